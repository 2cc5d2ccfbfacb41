"""Workers die at each point of a step; the others go on, and no step is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.jobs import Job, run_job
from elastic.journals import check_core_job
from elastic.plans import Fault, Plan

POINTS = (
    "barrier",
    "before backward",
    "some buckets",
    "all buckets",
    "commit submitted",
    "before step",
    "in step",
    "after step",
    "metric",
    "metric submitted",
    "commit",
)
STEPS = 40


def run_faults(
    folder: Path, ranks: int, faults: Sequence[Fault], steps: int = STEPS, **options: object
) -> Job:
    """Run a job with these faults, and check it; all victims must have met their fault."""
    plan = Plan(str(folder), steps, tuple(faults), **options)  # type: ignore[arg-type]
    job = run_job("core_worker.py", ranks, plan)
    check_core_job(job.journeys, steps)
    victims = {fault.worker for fault in faults}
    assert victims == {n for n, one in job.journeys.items() if one.times("fault")}
    assert not [n for n in victims if job.journeys[n].end is not None]
    # A slow job starts others in the places of the dead, and may end before they join it.
    came = {n for n, one in job.journeys.items() if n < ranks or one.entered}
    assert not [n for n in came - victims if job.journeys[n].end is None]
    return job


@pytest.mark.long
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("first", range(0, len(POINTS), 3))
def test_four_workers_die_one_after_the_other(first: int, hosts: int, tmp_path: Path) -> None:
    victims = (0, 2, 3) if hosts == 1 else (3, 0, 1)
    points = (*POINTS, *POINTS[:2])[first : first + 3]
    faults = [
        Fault(victim, point, 4 + 8 * number)
        for number, (victim, point) in enumerate(zip(victims, points, strict=True))
    ]
    run_faults(tmp_path, 4, faults, hosts=hosts)


@pytest.mark.parametrize("number", range(len(POINTS)))
def test_one_of_two_dies(number: int, tmp_path: Path) -> None:
    fault = Fault(number % 2, POINTS[number], 8)
    run_faults(tmp_path, 2, [fault], steps=20, hosts=1 + number // 2 % 2)


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("point", ["some buckets", "commit submitted", "metric"])
def test_all_but_one_die_at_once(point: str, hosts: int, tmp_path: Path) -> None:
    run_faults(tmp_path, 4, [Fault(victim, point, 8) for victim in (0, 1, 3)], hosts=hosts)


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.0, 0.0003, 0.001, 0.003])
def test_workers_die_while_their_collectives_run(delay: float, tmp_path: Path) -> None:
    faults = [
        Fault(victim, "some buckets", 6 + 8 * number, "soon", delay)
        for number, victim in enumerate((1, 0, 2))
    ]
    run_faults(tmp_path, 4, faults)


@pytest.mark.parametrize("point", ["forming resume", "connected"])
@pytest.mark.parametrize("second, hosts", [(0, 1), (2, 2)])
def test_second_death_while_the_next_epoch_forms(
    point: str, second: int, hosts: int, tmp_path: Path
) -> None:
    faults = [Fault(1, "all buckets", 8), Fault(second, point, 1), Fault(3, point, 2)]
    run_faults(tmp_path, 4, faults, hosts=hosts)


def test_deaths_between_the_question_for_updates_and_its_answer(tmp_path: Path) -> None:
    run_faults(tmp_path, 4, [Fault(0, "check", 1), Fault(3, "check", 4), Fault(1, "check", 4)])


@pytest.mark.parametrize("how", ["raise", "term", "exit"])
def test_other_ways_to_end(how: str, tmp_path: Path) -> None:
    faults = [Fault(2, "some buckets", 6, how), Fault(0, "before step", 14, how)]
    job = run_faults(tmp_path, 4, faults)
    if how == "raise":
        # The registrar heard it from the worker, before the worker's process ended.
        assert "worker 2 (host" in job.epochs()[1] and " raised PlannedError: " in job.epochs()[1]


@pytest.mark.parametrize("ranks, hosts, how", [(2, 1, "kill"), (3, 1, "raise"), (4, 2, "kill")])
def test_death_of_all_ends_the_job_with_the_first_failure(
    ranks: int, hosts: int, how: str, tmp_path: Path
) -> None:
    faults = tuple(Fault(worker, "some buckets", 8, how) for worker in range(ranks))
    plan = Plan(str(tmp_path), STEPS, faults, hosts)
    # A process that takes longer than the heartbeat to end is killed.
    flags = ("--elastic-heartbeat", "30")
    job = run_job("core_worker.py", ranks, plan, flags, status=137 if how == "kill" else 1)
    assert all(one.end is None for one in job.journeys.values())
    assert "failed first: " in job.result.stderr
