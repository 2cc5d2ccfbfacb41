"""`hvdlite.spark.run` in a session of Spark Connect, whose driver is another process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from clusters import spark_sessions
from harness import base_environment

NEEDED = ("grpc", "grpc_status", "google.rpc", "zstandard")


def why_not() -> str:
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"Spark Connect needs {name}: pip install 'pyspark[connect]'"
    return spark_sessions.why_not()


pytestmark = [pytest.mark.spark, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SCRIPT = """
import os, signal, time
from pyspark.sql import SparkSession
import hvdlite.spark
from hvdlite.errors import ArgumentError, RankFailedError

def number(factor):
    from hvdlite import basics
    basics.init()
    return basics.rank() * factor, basics.size()

def fail(how):
    from hvdlite import basics
    basics.init()
    basics.engine().barrier("all are here").wait()
    if basics.rank() == 1 and how == "raise":
        raise ValueError("boom")
    if basics.rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

session = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(session).__module__
assert hvdlite.spark.run(number, (10,), num_proc=2) == [(0, 2), (10, 2)]
assert list(map(len, hvdlite.spark.run(lambda: bytes(5 << 20), num_proc=2))) == [5 << 20] * 2
for how, kind in (("raise", ValueError), ("task", RankFailedError)):
    try:
        hvdlite.spark.run(fail, (how,), num_proc=2)
    except kind as error:
        print("raised", error)
try:
    hvdlite.spark.run(number, (1,))
except ArgumentError as error:
    print("raised", error)
session.stop()
"""


def test_results_and_failures(tmp_path: Path) -> None:
    own = base_environment()
    own |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    own |= {"SPARK_LOCAL_DIRS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    own |= {"SPARK_SUBMIT_OPTS": spark_sessions.COMPILES_QUICKLY}
    script = tmp_path / "connect.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=own,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("raised")]
    assert said[0] == "raised boom"
    assert said[1].startswith("raised Spark lost the task of rank 1, or its executor: ")
    assert said[2].startswith("raised num_proc is needed here")
