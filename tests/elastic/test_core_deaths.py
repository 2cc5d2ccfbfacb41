"""Workers die at each point of a step; the others go on, and the oracle replays the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.faults import Fault, Plan
from elastic.jobs import run_job
from elastic.journals import check_core_job

POINTS = (
    "before backward",
    "some buckets",
    "all buckets",
    "commit submitted",
    "before step",
    "in step",
    "after step",
    "metric",
    "metric submitted",
)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("first", range(0, len(POINTS), 3))
def test_four_workers_die_one_after_the_other(first: int, hosts: int, tmp_path: Path) -> None:
    victims = (0, 2, 3) if hosts == 1 else (3, 0, 1)
    faults = [
        Fault(victim, point, 5 + 8 * number)
        for number, (victim, point) in enumerate(zip(victims, POINTS[first : first + 3]))
    ]
    job = run_job("core_worker.py", 4, Plan(str(tmp_path), 40, tuple(faults), hosts))
    check_core_job(job.journeys, 40)
    assert [job.journeys[victim].end for victim in victims] == [None] * 3
