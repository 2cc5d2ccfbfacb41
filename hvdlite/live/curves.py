"""A run over time: the curves of the page and of the report."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdlite.live.sample import Sample
from hvdlite.live.totals import PHASES


@dataclass(frozen=True)
class Curves:
    """What a job did in each of some intervals, in turn."""

    time: list[float]  # Each interval ends at this second of rank 0's clock.
    step: list[float | None]  # This is the mean time of a step in seconds; None without steps.
    phases: dict[str, list[float | None]]  # By name, the step's parts are means of all ranks.
    samples: list[float]  # All ranks together train on so many per second.
    bytes: list[float]  # One rank gives so many to collectives per second.


def curves(history: Mapping[int, Sequence[Sample]], most: int = 120) -> Curves:
    """Return what `Run.history()` tells, in at most `most` intervals."""
    found = Curves([], [], {name: [] for name in PHASES}, [], [])
    points = next(
        (samples for samples in history.values() if samples[-1].steps is not None),
        next(iter(history.values()), ()),
    )
    apart = max(1, -(-(len(points) - 1) // most))
    kept = points[::-1][::apart][::-1]  # The newest one stays.
    samples = _samples(history.values(), [point.time for point in kept])
    for (first, last), (before, after) in zip(pairwise(kept), pairwise(samples), strict=True):
        seconds = last.time - first.time
        if seconds <= 0:
            continue
        step, phases = _steps_between(first, last)
        found.time.append(last.time)
        found.step.append(step)
        for name in PHASES:
            found.phases[name].append(phases.get(name))
        found.samples.append((after - before) / seconds)
        moved = last.counters.get("bytes", 0) - first.counters.get("bytes", 0)
        found.bytes.append(max(0, moved) / seconds)  # Another engine counts from 0.
    return found


def _steps_between(first: Sample, last: Sample) -> tuple[float | None, dict[str, float]]:
    """Return the mean step between two samples of rank 0, and its phases as means of the ranks."""
    if first.steps is None or last.steps is None:
        return None, {}
    count = last.steps.count - first.steps.count
    if count <= 0:
        return None, {}
    ranks = len(last.steps.ranks)
    phases = {
        name: sum(getattr(row, name) for row in last.steps.ranks)
        - sum(getattr(row, name) for row in first.steps.ranks)
        for name in PHASES
    }
    return (
        (last.steps.seconds - first.steps.seconds) / count,
        {name: seconds / count / ranks for name, seconds in phases.items()},
    )


def _samples(history: Iterable[Sequence[Sample]], times: Sequence[float]) -> list[float]:
    """Return how many samples all ranks had at each time, which may lie between two lines."""
    sums = [0.0] * len(times)
    for points in history:
        said = [point.time for point in points]
        for i, time in enumerate(times):
            after = bisect_left(said, time)
            one, other = points[max(0, after - 1)], points[min(after, len(points) - 1)]
            share = (time - one.time) / (other.time - one.time) if other is not one else 0.0
            sums[i] += one.samples + min(1.0, max(0.0, share)) * (other.samples - one.samples)
    return sums
