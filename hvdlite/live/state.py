"""What the page shows of a run: numbers and words, ready for JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from hvdlite.live.curves import curves
from hvdlite.live.findings import Straggler, find, straggler
from hvdlite.live.run import Figures, RankFigures, Run
from hvdlite.live.totals import PHASES
from hvdlite.live.words import percent, time_text

_SPAN = 10.0  # seconds that the page's figures are means of
_LONG_SPAN = 60.0  # seconds that findings and notes are about
_EVENTS = 50  # The last ones are told.
_DIGITS = 7


def state(run: Run, now: float, program: str, outcome: str | None = None) -> bytes:
    """Return the state of a run as JSON."""
    # `now` is a monotonic time of this process in seconds. `program` is the name of its script.
    # `outcome` says how the job ended; None while it runs.
    figures = run.figures(_SPAN, now)
    lasting = run.figures(_LONG_SPAN, now)
    late = straggler(lasting) if lasting else None
    latest = run.latest()
    began = run.began
    over_time = asdict(curves(run.history()))
    over_time["time"] = [time - began for time in over_time["time"]]
    events = sorted(run.events(), key=lambda event: event.time)  # They come a second late or less.
    told = {
        "program": program,
        "outcome": outcome,
        "job": None if figures is None else _job(figures, latest[0].time - began),
        "findings": [asdict(finding) for finding in find(lasting)] if lasting else [],
        "ranks": [_rank(rank, late) for rank in figures.ranks] if figures else [],
        "stalled": [asdict(stall) for stall in figures.stalled] if figures else [],
        "events": [
            {**asdict(event), "time": event.time - began} for event in events[: -_EVENTS - 1 : -1]
        ],
        "curves": over_time,
    }
    return json.dumps(_plain(told), separators=(",", ":"), allow_nan=False).encode()


def _job(figures: Figures, age: float) -> dict[str, Any]:
    return {
        "age": age,
        "seconds": figures.seconds,
        "epoch": figures.epoch,
        "size": figures.size,
        "steps": figures.total_steps,
        "rate": figures.rate,
        "step": figures.step,
        "samples": figures.samples,
        "bytes": figures.bytes,
        "values": figures.ranks[0].values,
    }


def _rank(rank: RankFigures, late: Straggler | None) -> dict[str, Any]:
    """Return a row of the table; a process that says nothing of itself has no threads."""
    note = f"silent for {rank.silent:.0f} s" if rank.silent else ""
    if late is not None and late.rank == rank.rank:
        note = note or (
            f"straggler: {time_text(late.seconds)} late in {late.phase}, the last in "
            f"{percent(late.share)} of the steps"
        )
    speaks = rank.threads > 0
    return {
        "rank": rank.rank,
        "host": rank.host,
        **{phase: getattr(rank, phase) for phase in PHASES},
        "cpu": rank.cpu if speaks else None,
        "rss": rank.rss if speaks else None,
        "note": note,
    }


def _plain(value: Any) -> Any:
    """Replace what JSON has no word for, such as a loss that is NaN, by a text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else str(value)
    return value
