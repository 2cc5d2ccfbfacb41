"""Torch workers die at each point of a step: no step and no sample is lost or done twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.jobs import Job, run_job
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
    preload: Sequence[str] = ("torch._dynamo",),
    **plan: Any,
) -> Job:
    """Run a job with these faults; the workers check each step, and all samples at the end."""
    whole = Plan(str(folder), EPOCHS, tuple(faults), **plan)
    job = run_job("torch_worker.py", ranks, whole, preload=preload)
    victims = {fault.worker for fault in faults}
    assert {n for n, one in job.journeys.items() if one.times("fault")} == victims
    ended = {n for n, one in job.journeys.items() if one.end is not None}
    assert ended >= {*range(ranks)} - victims
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
    run_faults(tmp_path, 4, faults, hosts=hosts)


def test_all_but_one_die_in_backward(tmp_path: Path) -> None:
    # The parameters before this one have time to be reduced.
    faults = [Fault(victim, "in hook", 9, delay=0.1) for victim in (0, 1, 2)]
    run_faults(tmp_path, 4, faults, preload=())  # These start as those of a user.


@pytest.mark.long
def test_ranks_that_raise_in_a_hook_or_finish(tmp_path: Path) -> None:
    faults = [Fault(1, "in hook", 6, "raise"), Fault(2, "before step", 20, "exit")]
    run_faults(tmp_path, 3, faults)


@pytest.mark.long
@pytest.mark.parametrize("op", ["sum", "adasum"])
def test_samples_of_unfinished_steps_are_used_again(op: str, tmp_path: Path) -> None:
    how = {"op": op, "passes": 6, "commit_every": 1, "pause": 0.01}
    job = run_faults(tmp_path, 3, [Fault(2, "before backward", 7)], **how)
    # Three ranks have made a step of 24 samples each when the others come to a boundary.
    enters = [one for one in job.journeys[0].records if one["kind"] == "enter"]
    assert [(one["size"], one["samples"]) for one in enters[:2]] == [(3, 68), (2, 66)]


@pytest.mark.long
def test_step_by_adasum_is_of_the_same_ranks_for_all_parameters(tmp_path: Path) -> None:
    # The requests before the one that a worker does not send have time to end.
    faults = [Fault(2, "request", 3 * 5 + 3, delay=0.2), Fault(0, "request", 6 * 5 + 1, delay=0.2)]
    run_faults(tmp_path, 3, faults, op="adasum")


@pytest.mark.long
@pytest.mark.parametrize("how", [{"compressed": True}, {"op": "local"}], ids=["bf16", "local"])
def test_others_join_in_the_place_of_the_dead_in_each_mode(
    how: dict[str, Any], tmp_path: Path
) -> None:
    faults = [Fault(2, "in hook", 13), Fault(1, "round" if "op" in how else "before step", 16)]
    job = run_faults(tmp_path, 3, faults, hold_at=24, hold_until=3, **how)
    assert {n for n, one in job.journeys.items() if one.end is not None} >= {0, 3, 4}
