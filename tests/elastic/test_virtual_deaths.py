"""Training with virtual ranks ends in the bits of one process, wherever workers die and join."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_deaths_in_each_part_of_a_step_and_joins_leave_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    points = ("forward", "backward", "buffers", "before step", "question", "answer", "broadcast")
    # Workers 4 and 5 join in the place of the first two that die, and 9 is the last rank at its
    # death, after which the others go back to a commit.
    victims = zip((3, 0, 2, 1, 4, 5, 9), points, (1, 3, 6, 8, 11, 13, 16), strict=True)
    faults = tuple(Fault(*victim) for victim in victims)
    plan = Plan(str(tmp_path), 3, faults, commit_every=2, hold_at=5, hold_until=4, unredoable_at=16)
    job = run_job(SCRIPT, 4, plan, preload=("torch._dynamo",))
    met = {n for n, one in job.journeys.items() if one.times("fault")}
    assert met == {fault.worker for fault in faults}
    assert {n for n, one in job.journeys.items() if one.end} == {6, 7, 8, 10}
    assert sum(len(one.times("again")) for one in job.journeys.values()) >= 4
    expected = alone(plan)
    assert {one.end["hash"] for one in job.journeys.values() if one.end} == {expected}
