"""A job that never ran: the samples that its ranks would have written, one a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvdlite.live.run import Run
from hvdlite.live.sample import RankSteps, Sample, Steps

BEGAN = 100.0  # on the clocks of the ranks
FIRST = 50.0  # on the clock of the reader, which has the sample of second n at FIRST + n


def make_sample(
    rank: int,
    second: float,
    count: int | None = None,
    *,
    size: int = 2,
    epoch: int = 0,
    host: str = "node",
    late: float = 0.02,
    straggler: int | None = None,
    in_backward: float = 0.0,
) -> Sample:
    """Make a sample of a rank after ten steps a second; steps of 100 ms.

    Args:
        rank: whose sample it is.
        second: of the job.
        count: of the steps so far, if not ten a second.
        size: of the world.
        epoch: of the world.
        host: how the names of all hosts begin.
        late: seconds by which the straggler is late in each step.
        straggler: the last rank of each step; None means the highest, and -1 means none.
        in_backward: seconds of those that it is late in backward, and not before.
    """
    count = round(10 * second) if count is None else count
    late_rank = size - 1 if straggler is None else straggler
    rows = [_steps(count, 0.04, late, 0.01, 0.05 - late)] * size
    if late_rank >= 0:
        before = late - in_backward
        times = (0.04 + in_backward, 0.0, 0.01, 0.05 - in_backward)
        rows[late_rank] = _steps(count, *times, 1.0, before, in_backward, late)
    return Sample(
        rank=rank,
        size=size,
        epoch=epoch,
        host=f"{host}{rank}",
        pid=100 + rank,
        time=BEGAN + second,
        began=BEGAN,
        counters={"bytes": 4_000_000 * count},
        cpu=0.9 * second,
        rss=1 << 30,
        switches=int(7 * second),
        threads=4,
        cores=4,
        samples=32 * count,
        values={"loss": 1 / (1 + second)},
        steps=Steps(count, 0.1 * count, tuple(rows)) if rank == 0 else None,
    )


def _steps(count: int, *each: float) -> RankSteps:
    """Sum what each step has."""
    sums = [round(count * one, 6) for one in each]
    return RankSteps(*sums, *[0.0] * (8 - len(sums)))


def make_run(seconds: int = 30, size: int = 2, more: Any = None, **how: Any) -> Run:
    """Make a run of so many seconds; `more` has fields of all samples of rank 0."""
    run = Run()
    for second in range(1, seconds + 1):
        for rank in range(size):
            sample = make_sample(rank, second, size=size, **how)
            run.add(replace(sample, **(more or {})) if rank == 0 else sample, FIRST + second)
    return run
