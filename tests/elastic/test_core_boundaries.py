"""Workers join, and die at boundaries; or all restore their last commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.jobs import Job, run_job
from elastic.journals import check_core_job
from elastic.plans import Fault, Plan

STEPS = 30


def run_with_joiners(folder: Path, ranks: int, until: int, *faults: Fault, hosts: int = 1) -> Job:
    """Run a job whose workers wait for an epoch, in which workers have joined."""
    plan = Plan(str(folder), STEPS, faults, hosts, hold_at=13, hold_until=until)
    job = run_job("core_worker.py", ranks, plan)
    check_core_job(job.journeys, STEPS)
    met = {n for n, one in job.journeys.items() if one.times("fault")}
    assert met == {fault.worker for fault in faults}
    return job


@pytest.mark.long
@pytest.mark.parametrize("hosts", [1, 2])
def test_worker_that_died_is_replaced(hosts: int, tmp_path: Path) -> None:
    job = run_with_joiners(tmp_path, 2, 2, Fault(0, "some buckets", 10), hosts=hosts)
    assert job.journeys[2].end is not None
    assert job.journeys[2].entered == [13]
    assert job.journeys[1].entered == [0, 12, 13]  # again because data is distributed anew at 12


@pytest.mark.long
@pytest.mark.parametrize("victim, hosts", [(1, 1), (3, 2)])
@pytest.mark.parametrize("point", ["forming boundary", "connected"])
def test_death_while_an_epoch_with_a_joiner_forms(
    point: str, victim: int, hosts: int, tmp_path: Path
) -> None:
    faults = (Fault(2, "before step", 10), Fault(victim, point, 2))
    run_with_joiners(tmp_path, 3, 3, *faults, hosts=hosts)


@pytest.mark.long
@pytest.mark.parametrize("victim, hosts", [(0, 2), (3, 1)])
def test_root_or_joiner_dies_in_sync(victim: int, hosts: int, tmp_path: Path) -> None:
    faults = (Fault(2, "after step", 10), Fault(victim, "sync", 0 if victim == 3 else 1))
    run_with_joiners(tmp_path, 3, 3, *faults, hosts=hosts)


UNREDOABLE = [("alltoall", 2, 1), ("alltoall", 4, 2), ("reducescatter", 3, 1), ("broadcast", 3, 2)]


@pytest.mark.long
@pytest.mark.parametrize("kind, ranks, hosts", UNREDOABLE)
def test_what_cannot_be_redone_restores_the_last_commit(
    kind: str, ranks: int, hosts: int, tmp_path: Path
) -> None:
    fault = Fault(1, "unredoable", 10, "last")
    plan = Plan(str(tmp_path), 20, (fault,), hosts, unredoable_at=10, unredoable=kind)
    job = run_job("core_worker.py", ranks, plan)
    check_core_job(job.journeys, 20)
    survivors = [one for n, one in job.journeys.items() if n != 1 and n < ranks]
    assert [one.restored for one in survivors] == [1] * (ranks - 1)
    assert [one.entered for one in survivors] == [[0, 8]] * (ranks - 1)


def test_steps_below_min_np_wait_for_who_joins(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), STEPS, (Fault(1, "some buckets", 10),))
    job = run_job("core_worker.py", 2, plan, ("--min-np", "2"))
    check_core_job(job.journeys, STEPS)
    # However fast the steps are, the job has not come past its next commit with one rank.
    assert job.journeys[2].entered == [12]
    assert job.journeys[2].end is not None
