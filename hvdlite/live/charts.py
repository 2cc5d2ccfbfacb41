"""The charts of a report: one SVG by matplotlib, its text kept as text."""

from __future__ import annotations

import io
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing

from hvdlite.live.record import Record
from hvdlite.live.run import RankFigures
from hvdlite.live.sample import Sample

MOST_RANKS = 32  # The first chart has so many bars, for the ranks that are the last most often.
_MOST_LINES = 8  # So many ranks have a line of their own.
PHASES = {  # The file static/live.css has the same colours.
    "backward": "#0072b2",
    "waiting": "#e69f00",
    "communicating": "#009e73",
    "between": "#8c959f",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # Text stays text: it can be searched and read aloud.
    "svg.hashsalt": "hvdlite",
    "text.parse_math": False,  # A host may be called "$x".
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
}


def draw(record: Record) -> str:
    """Draw the charts of a job as one `<svg>` element."""
    with rc_context(_STYLE), warnings.catch_warnings():
        # Names in a script that the font does not have are drawn by the reader's own font.
        warnings.filterwarnings("ignore", message=".*missing from.*font", category=UserWarning)
        return _svg(_drawing(record))


def chosen(record: Record) -> list[RankFigures]:
    """Return the ranks that are drawn as bars: all, or those that are the last most often."""
    ranks = record.figures.ranks if record.figures is not None else ()
    latest = sorted(ranks, key=lambda rank: (-rank.last, rank.waiting, rank.rank))
    return sorted(latest[:MOST_RANKS], key=lambda rank: rank.rank)


def _drawing(record: Record) -> Drawing:
    bars = 0.8 + 0.22 * max(2, len(chosen(record)))
    heights = [bars, 1.6, 1.6, 1.6]
    drawing = Drawing(figsize=(9, sum(heights) + 1.2), layout="constrained")
    FigureCanvasSVG(drawing)
    phases, step, rate, moved = drawing.subplots(4, 1, gridspec_kw={"height_ratios": heights})
    _phases(phases, chosen(record))
    clock = next((points for points in record.history.values() if points[-1].steps), [])
    _steps(step, record, clock)
    _rates(rate, moved, record, clock)
    times = [points[-1].time for points in record.history.values()]
    for axes in (step, rate, moved):
        _events(axes, record)
        axes.set_xlim(0.0, max(1.0, max(times, default=0.0) - record.origin))
        axes.set_ylim(bottom=0.0)
        axes.grid(axis="y", alpha=0.3)
    step.sharex(rate)
    moved.sharex(rate)
    moved.set_xlabel("seconds since hvd.init()")
    return drawing


def _svg(drawing: Drawing) -> str:
    text = io.StringIO()
    drawing.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _phases(axes: Axes, ranks: Sequence[RankFigures]) -> None:
    labels = [f"{_plain(rank.host)}  rank {rank.rank}" for rank in ranks]
    before = [0.0] * len(ranks)
    for phase, colour in PHASES.items():
        widths = [max(0.0, 1e3 * getattr(rank, phase)) for rank in ranks]
        axes.barh(range(len(ranks)), widths, left=before, color=colour, label=phase, height=0.7)
        before = [start + width for start, width in zip(before, widths, strict=True)]
    axes.set_yticks(range(len(ranks)), labels)
    axes.invert_yaxis()
    axes.set_title("a step of each rank, ms")
    if ranks:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)


def _steps(axes: Axes, record: Record, clock: Sequence[Sample]) -> None:
    """Draw the time of a step, and how much of it each rank computes."""
    axes.set_title("time of a step, and what each rank computes of it, ms")
    spans = [(a, b) for a, b in pairwise(clock) if _count(b) > _count(a)]
    times = [b.time - record.origin for _, b in spans]
    steps = [1e3 * (_seconds(b) - _seconds(a)) / (_count(b) - _count(a)) for a, b in spans]
    axes.plot(times, steps, color="black", linewidth=1.2, label="step", marker=_mark(times))
    size = len(clock[-1].steps.ranks) if clock and clock[-1].steps else 0
    for rank in range(size if size <= _MOST_LINES else 0):
        own = [1e3 * _computing(a, b, rank) for a, b in spans]
        axes.plot(times, own, linewidth=0.9, label=f"rank {rank}", marker=_mark(times))
    if spans:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")


def _rates(rate: Axes, moved: Axes, record: Record, clock: Sequence[Sample]) -> None:
    """Draw what all ranks do in a second."""
    has_samples = any(points[-1].samples for points in record.history.values())
    rate.set_title("samples/s of all ranks" if has_samples else "steps/s")
    histories = list(record.history.values()) if has_samples else [clock] if clock else []
    _line(rate, record, histories, _samples if has_samples else _count)
    moved.set_title("MB/s that a rank gives to collectives, the mean of all")
    histories = list(record.history.values())
    _line(moved, record, histories, _bytes, 1e-6 / max(1, len(histories)))


def _line(
    axes: Axes,
    record: Record,
    histories: Sequence[Sequence[Sample]],
    read: Callable[[Sample], float],
    scale: float = 1.0,
) -> None:
    if not histories:
        return
    moments = [sample.time for sample in histories[0]]
    totals = [sum(_at(points, moment, read) for points in histories) for moment in moments]
    rates = [
        scale * (b - a) / max(1e-9, end - begin)
        for (begin, end), (a, b) in zip(pairwise(moments), pairwise(totals), strict=True)
    ]
    times = [moment - record.origin for moment in moments[1:]]
    axes.plot(times, rates, color="#4477aa", linewidth=1.2, marker=_mark(times))


def _at(points: Sequence[Sample], moment: float, read: Callable[[Sample], float]) -> float:
    """Return a number that grows, at a moment: on the line between the samples around it."""
    after = bisect_right(points, moment, key=lambda sample: sample.time)
    if after in (0, len(points)):
        return read(points[0] if after == 0 else points[-1])
    a, b = points[after - 1], points[after]
    share = (moment - a.time) / max(1e-9, b.time - a.time)
    return read(a) + share * (read(b) - read(a))


def _events(axes: Axes, record: Record) -> None:
    for event in record.events:
        axes.axvline(event.time - record.origin, color="#aa3377", alpha=0.5, linewidth=0.8)


def _mark(times: Sequence[float]) -> str:
    return "." if len(times) < 40 else ""


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:40])


def _count(sample: Sample) -> float:
    return sample.steps.count if sample.steps is not None else 0


def _seconds(sample: Sample) -> float:
    return sample.steps.seconds if sample.steps is not None else 0.0


def _computing(a: Sample, b: Sample, rank: int) -> float:
    rows: list[Any] = [one.steps.ranks[rank] if one.steps is not None else None for one in (a, b)]
    before, after = (0.0 if row is None else row.backward + row.between for row in rows)
    return (after - before) / max(1.0, _count(b) - _count(a))


def _samples(sample: Sample) -> float:
    return sample.samples


def _bytes(sample: Sample) -> float:
    return sample.counters.get("bytes", 0)
