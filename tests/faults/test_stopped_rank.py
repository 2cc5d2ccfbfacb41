"""A rank is stopped (SIGSTOP, a debugger): the others say so, and do not wait for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launch.marked import MarkedJob, python

PRELOAD = ("numpy",)


JOB = """
import os, sys
from pathlib import Path
from hvdlite import basics, elastic
from hvdlite.objects import broadcast_object
def train(state):
    print("ready", flush=True)
    while not broadcast_object(Path(os.environ["TEST_FOLDER"], "end").exists(), 0):
        pass
basics.init()
if basics.in_elastic_job():
    elastic.run(train)(elastic.ObjectState(broadcast_object, basics.rank))
else:
    train(None)
"""


@pytest.mark.parametrize(("victim", "kind"), [(0, "elastic"), (1, "fixed")])
def test_stopped_rank_of_a_job_is_named(victim: int, kind: str, tmp_path: Path) -> None:
    flags = ("--stall-warning", "0.5", *(("--min-np", "1") if kind == "elastic" else ()))
    env = {"OMP_NUM_THREADS": "1", "TEST_FOLDER": str(tmp_path)}
    with MarkedJob(2, *flags, *python(JOB), env=env) as job:
        job.wait_until_ready(2)
        (pid,) = job.alive(f"HVDLITE_RANK={victim}")
        os.kill(pid, signal.SIGSTOP)
        job.wait_for_stderr(f"rank {victim}")
        os.kill(pid, signal.SIGCONT)
        (tmp_path / "end").touch()
        status, _, stderr, _ = job.finish()
    assert status == 0, stderr
