"""A Spark for the tests: its JVM is a child of this process, and is gone after the tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import package_path
from patience import HANG

# Most of a JVM's time would go to compiling well what runs for seconds only.
COMPILES_QUICKLY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SETTINGS = {
    "spark.executor.extraJavaOptions": COMPILES_QUICKLY,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
}


def why_not() -> str:
    """Return why Spark cannot be tested here; "" if it can."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is missing: pip install 'hvdlite[spark]'"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "Java is missing: tools/test_packages.sh installs it"
    return ""


MARKS = [
    pytest.mark.spark,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
]


@contextlib.contextmanager
def spark(master: str, folder: Path, **settings: str) -> Iterator[Any]:
    """Start Spark, and end it with all of its processes.

    Args:
        master: such as "local[2]".
        folder: for the files of Spark and of its executors.
        settings: more settings, with "__" for each dot.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    folders = [str(Path(__file__).parents[1]), *package_path()]
    variables = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_WORKER_DIR": str(folder),
        "SPARK_SUBMIT_OPTS": COMPILES_QUICKLY,
        "OMP_NUM_THREADS": "1",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        builder = SparkSession.builder.master(master).appName("hvdlite's tests")
        for name, value in {**_SETTINGS, **settings}.items():
            builder = builder.config(name.replace("__", "."), value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        try:
            yield session
        finally:
            session.stop()
    finally:
        os.environ.clear()
        os.environ.update(before)
        _end_jvm(SparkContext)


def gpus(folder: Path, *addresses: str) -> dict[str, str]:
    """Return settings by which Spark finds these GPUs on each worker, and gives one to a task."""
    script = folder / "gpus.sh"
    names = ", ".join(f'"{address}"' for address in addresses)
    script.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{names}]}}\'\n')
    script.chmod(0o755)
    found = {}
    for owner in ("worker", "executor"):
        found[f"spark__{owner}__resource__gpu__amount"] = str(len(addresses))
        found[f"spark__{owner}__resource__gpu__discoveryScript"] = str(script)
    return {**found, "spark__task__resource__gpu__amount": "1"}


def _end_jvm(context: Any) -> None:
    """End the JVM, which pyspark leaves running for the next session."""
    gateway = context._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(HANG)
        context._gateway = context._jvm = None
