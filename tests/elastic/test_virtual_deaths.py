"""Training with virtual ranks ends in the bits of one process, wherever workers die and join."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.jobs import run_job
from elastic.plans import Fault, Plan
from harness import base_environment

SCRIPT = "virtual_worker.py"


def alone(plan: Plan) -> str:
    """Train in one process without a launcher, and return the hash."""
    return subprocess.check_output(
        [sys.executable, str(Path(__file__).with_name(SCRIPT)), plan.as_json()],
        env={**base_environment(), "OMP_NUM_THREADS": "1"},
        text=True,
    ).strip()


def check_job(folder: Path, epochs: int, faults: dict[tuple[int, int], str], **plan: Any) -> None:
    """Run a job of 4 ranks, and compare it with one process; `faults` are by worker and step.

    Before each fifth step the workers wait until others have joined in the place of the dead.
    """
    planned = tuple(Fault(worker, point, step) for (worker, step), point in faults.items())
    whole = Plan(str(folder), epochs, planned, commit_every=2, hold_at=5, hold_until=4, **plan)
    job = run_job(SCRIPT, 4, whole, preload=("torch._dynamo",))
    victims = {worker for worker, _ in faults}
    assert {n for n, one in job.journeys.items() if one.times("fault")} == victims
    assert sum(len(one.times("again")) for one in job.journeys.values()) >= len(victims) / 2
    ends = {n: one.end["hash"] for n, one in job.journeys.items() if one.end}
    assert {*ends} == {*range(4 + len(victims))} - victims
    assert {*ends.values()} == {alone(whole)}


def test_three_die_and_three_join(tmp_path: Path) -> None:
    faults = {(3, 1): "forward", (0, 2): "backward", (2, 3): "before step"}
    check_job(tmp_path, 2, faults)


@pytest.mark.long
def test_workers_die_in_each_part_of_a_reduction_and_go_back_to_a_commit(tmp_path: Path) -> None:
    faults = {(3, 1): "forward", (0, 3): "backward", (2, 6): "buffers", (1, 8): "before step"}
    faults |= {(4, 11): "question", (5, 13): "answer", (9, 16): "broadcast"}
    check_job(tmp_path, 3, faults, unredoable_at=16)  # Worker 9 is the last rank then.
