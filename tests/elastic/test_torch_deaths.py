"""Torch workers die at each point of a step: no step and no sample is lost or done twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.jobs import Job, run_job
from elastic.journals import check_torch_job
from elastic.plans import Fault, Plan

POINTS = (
    "in hook",
    "before step",
    "in step",
    "before backward",
    "after step",
    "metric",
    "batch norm",
    "commit",
    "check",
)
EPOCHS = 3


def run_faults(
    folder: Path,
    ranks: int,
    faults: Sequence[Fault],
    hosts: int = 1,
    preload: Sequence[str] = ("torch._dynamo",),
) -> Job:
    """Run a job with these faults, and ask the oracle; all victims must have met their fault."""
    plan = Plan(str(folder), EPOCHS, tuple(faults), hosts)
    job = run_job("torch_worker.py", ranks, plan, preload=preload)
    check_torch_job(job.journeys, EPOCHS)
    met = {n for n, one in job.journeys.items() if one.times("fault")}
    assert met == {fault.worker for fault in faults}
    return job


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, len(POINTS), 3))
def test_four_workers_die_one_after_the_other(first: int, tmp_path: Path) -> None:
    hosts = 1 + first // 3 % 2
    victims = (2, 0, 3) if hosts == 1 else (0, 3, 1)
    faults = [
        Fault(victim, point, 8 + 8 * number if point != "check" else 6)
        for number, (victim, point) in enumerate(
            zip(victims, POINTS[first : first + 3], strict=True)
        )
    ]
    run_faults(tmp_path, 4, faults, hosts)


def test_all_but_one_die_in_backward(tmp_path: Path) -> None:
    faults = [Fault(victim, "in hook", 9) for victim in (0, 1, 2)]
    run_faults(tmp_path, 4, faults, preload=())  # These start as those of a user.


@pytest.mark.long
def test_ranks_that_raise_in_a_hook_or_finish(tmp_path: Path) -> None:
    faults = [Fault(1, "in hook", 6, "raise"), Fault(2, "before step", 20, "exit")]
    run_faults(tmp_path, 3, faults)
