"""A rank is stopped (SIGSTOP, a debugger): the others say so, and do not wait for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import reduce_until_error, works
from harness import World
from hvdlite import basics
from launch.marked import MarkedJob, python
from patience import wait_until

PRELOAD = ("numpy",)

LIMIT = 3.0
ENVIRONMENT = {
    "HVDLITE_STALL_WARNING": "0.5",
    "HVDLITE_COLLECTIVE_TIMEOUT": str(LIMIT),
}


def train(inside: bool, folder: str) -> dict[str, Any]:
    basics.init()
    assert works("before")
    print("trains", flush=True)
    if not inside:
        wait_until((Path(folder) / "stopped").exists, "a rank is stopped")
    error = reduce_until_error("layer.weight")
    print("gives up", flush=True)
    return error


@pytest.mark.long
@pytest.mark.parametrize("inside", [True, False], ids=["in-collectives", "between-them"])
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_named_and_given_up(victim: int, inside: bool, tmp_path: Path) -> None:
    with World(3, train, inside, str(tmp_path), env=ENVIRONMENT) as world:
        for rank in range(3):
            world.wait_for(rank, "trains")
        world.signal(victim, signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        others = [rank for rank in range(3) if rank != victim]
        wait_until(
            lambda: any(f"rank {victim}" in world.stderr(rank) for rank in others), "a warning"
        )
        for rank in others:
            world.wait_for(rank, "gives up")
        world.signal(victim, signal.SIGCONT)
        results = world.wait()
    for rank in others:
        assert results[rank].value["rank"] == victim, results[rank].value
        assert results[rank].value["kind"] in ("CollectiveTimeoutError", "StalledError")


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


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
@pytest.mark.parametrize("victim", [0, 1])
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
