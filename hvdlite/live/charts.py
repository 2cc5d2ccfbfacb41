"""The charts of a report: SVGs without text, which fit any width, and their words beside them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hvdlite.live.findings import bytes_text, clock, number, time_text
from hvdlite.live.run import Figures, RankFigures
from hvdlite.live.sample import Event, Sample

PHASES = ("backward", "waiting", "communicating", "between")
MOST_RANKS = 32  # bars in the first chart, for the ranks that are the last most often
_MOST_POINTS = 120
_WIDTH, _HEIGHT = 1000, 100  # the size of an SVG in units of its own
_TOPS = (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10)  # An axis ends at one of these, times 10^n.


def draw(
    figures: Figures,
    history: Mapping[int, Sequence[Sample]],
    events: Sequence[Event],
    origin: float,
) -> list[str]:
    """Draw the charts of a job, each as a `<figure>`; their time begins at `origin`."""
    told = curves(history)
    times = [time - origin for time in told.time]
    marks = [event.time - origin for event in events]
    if any(told.samples):
        rate = ("Samples a second", told.samples)
    else:
        rate = ("Steps a second", [1 / step if step else 0.0 for step in told.step])
    return [
        _bars(figures),
        _plot("Step time", times, told.phases, time_text, marks),
        _plot(rate[0], times, {"accent": rate[1]}, number, marks),
        _plot("Bytes a second, by rank 0", times, {"accent": told.bytes}, bytes_text, marks),
    ]


def chosen(figures: Figures) -> list[RankFigures]:
    """Return the ranks that are drawn as bars: all, or those that are the last most often."""
    latest = sorted(figures.ranks, key=lambda rank: (-rank.last, rank.waiting, rank.rank))
    return sorted(latest[:MOST_RANKS], key=lambda rank: rank.rank)


def _bars(figures: Figures) -> str:
    ranks, count = chosen(figures), len(figures.ranks)
    sums = [sum(max(0.0, getattr(rank, phase)) for phase in PHASES) for rank in ranks]
    most = _round_up(max(sums, default=0.0))
    drawn = []
    for row, rank in enumerate(ranks):
        x = 0.0
        for phase in PHASES:
            seconds = max(0.0, getattr(rank, phase))
            width = _WIDTH * seconds / most
            drawn.append(
                f'<rect class="{phase}" x="{x:.1f}" y="{row + 0.1:.1f}" width="{width:.1f}" '
                f'height=".8"><title>rank {rank.rank}, {phase}: {time_text(seconds)}</title></rect>'
            )
            x += width
    height = max(160, 18 * len(ranks))
    return _figure(
        "Phases by rank",
        f"{len(ranks)} of {count} ranks" if len(ranks) < count else "",
        f'<div class="names">{_spans(f"rank {rank.rank}" for rank in ranks)}</div>'
        f'<svg role="img" aria-label="Phases of a step by rank; the table has the numbers" '
        f'viewBox="0 0 {_WIDTH} {max(1, len(ranks))}" preserveAspectRatio="none" '
        f'style="height:{height}px">{"".join(drawn)}</svg>',
        ("0", time_text(most / 2), time_text(most)),
        tall=height > 240,
    )


def _plot(
    title: str,
    times: Sequence[float],
    layers: Mapping[str, Sequence[float | None]],
    text: Callable[[float], str],
    marks: Sequence[float],
) -> str:
    """Draw layers, each upon the one before, over time; a single one is a line with an area."""
    if len(times) < 2:
        return _figure(title, "after some seconds", "", ())
    begin, end = times[0], times[-1]
    sums = [sum(layer[i] or 0.0 for layer in layers.values()) for i in range(len(times))]
    most = _round_up(max(sums))

    def x(time: float) -> float:
        return _WIDTH * (time - begin) / (end - begin)

    def points(values: Sequence[float], order: Iterable[int]) -> str:
        return " ".join(f"{x(times[i]):.1f},{_HEIGHT * (1 - values[i] / most):.1f}" for i in order)

    drawn = [f'<path class="grid" d="M0 {y}H{_WIDTH}"/>' for y in (0, _HEIGHT / 2, _HEIGHT)]
    below = [0.0] * len(times)
    for name, layer in layers.items():
        above = [one + (more or 0.0) for one, more in zip(below, layer, strict=True)]
        for piece in _pieces(layer):
            line = points(above, piece)
            area = f"{line} {points(below, reversed(piece))}"
            drawn.append(f'<polygon class="{name}" points="{area}"/>')
            if len(layers) == 1:
                drawn.append(f'<polyline points="{line}"/>')
        below = above
    drawn += [
        f'<path class="event" d="M{x(mark):.1f} 0V{_HEIGHT}"/>'
        for mark in marks
        if begin <= mark <= end
    ]
    gone = [all(layer[i] is None for layer in layers.values()) for i in range(len(times))]
    said = [
        f"{'no step' if gone[i] else text(sums[i])} at {clock(time)}"
        for i, time in enumerate(times)
    ]
    edges = [0.0, *(x((a + b) / 2) for a, b in pairwise(times)), float(_WIDTH)]
    drawn += [  # What a pointer is above tells its value.
        f'<rect class="at" x="{a:.1f}" width="{b - a:.1f}" height="{_HEIGHT}">'
        f"<title>{words}</title></rect>"
        for (a, b), words in zip(pairwise(edges), said, strict=True)
    ]
    return _figure(
        title,
        said[-1],
        f'<div class="scale">{_spans((text(most), text(most / 2), "0"))}</div>'
        f'<svg role="img" aria-label="{title}, over time" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none">{"".join(drawn)}</svg>',
        (clock(begin), clock(end)),
    )


def _figure(title: str, now: str, drawing: str, below: Sequence[str], tall: bool = False) -> str:
    plot = f'<div class="plot">{drawing}<div class="below">{_spans(below)}</div></div>'
    return (
        f'<figure class="box{" tall" if tall else ""}"><figcaption><b>{title}</b> '
        f'<span class="small">{now}</span></figcaption>{plot if drawing else ""}</figure>'
    )


def _spans(texts: Iterable[str]) -> str:
    return "".join(f"<span>{text}</span>" for text in texts)


def _pieces(values: Sequence[float | None]) -> list[list[int]]:
    """Return the indexes of a curve's points, in pieces that have no gap."""
    pieces = groupby(range(len(values)), key=lambda i: values[i] is not None)
    return [list(piece) for there, piece in pieces if there]


def _round_up(most: float) -> float:
    """Return a round number at or above `most`: the end of an axis."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next((top * power for top in _TOPS if top * power >= 0.999 * most), 10 * power)


@dataclass(frozen=True)
class Curves:
    """What a job did in each of some intervals, in turn."""

    time: list[float]  # the ends of the intervals, in seconds of rank 0's clock
    step: list[float | None]  # the mean time of a step in seconds; None without steps
    phases: dict[str, list[float | None]]  # by name, the step's parts as means of all ranks
    samples: list[float]  # of all ranks a second
    bytes: list[float]  # that one rank gives to collectives a second


def curves(history: Mapping[int, Sequence[Sample]]) -> Curves:
    """Return what `Run.history()` tells, in at most `_MOST_POINTS` intervals."""
    found = Curves([], [], {name: [] for name in PHASES}, [], [])
    points = next(
        (samples for samples in history.values() if samples[-1].steps is not None),
        next(iter(history.values()), ()),
    )
    apart = max(1, -(-(len(points) - 1) // _MOST_POINTS))
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
