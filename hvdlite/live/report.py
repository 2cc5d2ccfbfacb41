"""The report of a job: one HTML file, written anew every few seconds while the job runs.

The file needs nothing besides itself. What comes from ranks and scripts (names of hosts, tensors
and values, texts of events, the command) is escaped: it is text, and never markup.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryFile
from typing import Any

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.live.findings import (
    Finding,
    bytes_text,
    clock,
    count_text,
    find,
    note,
    number,
    percent,
    straggler,
    time_text,
    what_if,
)
from hvdlite.live.run import About, End, Figures, RankFigures, Run
from hvdlite.live.sample import Event, Sample

_PERIOD = 3.0  # seconds between two states
_MOST_WORK = 0.03  # Writing takes at most this share of the time; with many ranks the period grows.
_LATE = 15.0  # seconds without a new state, besides the period, after which a page says so
_SPAN = 60.0  # seconds that the figures of a job that runs are about
_VERSION = 1  # of the JSON file
_UNKNOWN = "an unknown host"
_MOST_EVENTS = 200  # in the table; the JSON file has all
_MOST_VALUES = 8  # columns for `hvd.observe` in the table of ranks
PHASES = ("backward", "waiting", "communicating", "between")
Curve = list[tuple[float, float]]  # times, in seconds of rank 0's clock, and values
_MOST_POINTS = 120  # of a curve
_WIDTH, _HEIGHT = 1000, 100  # the size of its drawing, in units of its own: it fits any width
_VIEW = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
_APART, _TURN = 0.2, 0.75  # shares of its width: for a label of an event; where labels turn
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect "
    "width='16' height='16' rx='3' fill='%231f6fb2'/%3E%3Cpath d='M3 12V7m3.3 5V4m3.4 8V9m3.3 3V5' "
    "stroke='white' stroke-width='2'/%3E%3C/svg%3E"
)


class Report:
    """Writes the report of a job; a `Viewer`.

    `path` names the HTML file; the JSON file has the same name, but for the suffix.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path.absolute()
        self._shown = path
        self._say = say
        self._failed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="hvdlite-report", daemon=True)

    def start(self, run: Run, about: About) -> None:
        self._run, self._about = run, about
        self._began = time.monotonic()
        self._thread.start()

    def stop(self, end: End) -> None:
        """Write the last state and the JSON file, and say where they are."""
        self._over.set()
        self._thread.join()
        record = self._write(end, 0.0)
        if record is not None:
            says = f": {record.findings[0].says}" if record.findings else ""
            self._say(f"report in {self._shown}{says}")

    def _keep(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # They are for the others.
        wait = 0.0
        while not self._over.wait(wait):
            began = time.thread_time()
            self._write(None, max(_PERIOD, wait) + _LATE)
            wait = max(_PERIOD, (time.thread_time() - began) / _MOST_WORK)

    def _write(self, end: End | None, late: float) -> Record | None:
        """Write the files; if that fails, say so in one line for all of the job."""
        now = time.monotonic()
        try:
            record = Record.of(self._run, self._about, end, now, now - self._began)
            write(record, self._path, late)
        except Exception as error:  # The job does not need its report.
            if not self._failed:
                self._failed = True
                why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
                self._say(f"there is no report in {self._shown}: {why}")
            return None
        return record


class OwnReport(Report):
    """The report of a job whose launcher is not hvdlite-run: rank 0 alone writes it.

    Rank 0 knows the phases of all ranks. What their processes use, and on which hosts they are, it
    does not know. A `Reporter` writes to it as to a pipe, which is never full.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Make a report that is not begun; raise ArgumentError if it cannot be written."""
        check_path(path, "HVDLITE_REPORT")
        super().__init__(path, say)
        self._process = os.getpid()

    def end(self) -> None:
        """Write the last state, when this process ends."""
        if os.getpid() != self._process:
            return  # This is a child of fork().
        error = getattr(sys, "last_value", None)  # No code has caught this exception.
        why = "" if error is None else f"rank 0: {type(error).__name__}: {error}"
        self.stop(End(int(error is not None), why))

    def ready(self) -> bool:
        return True

    def write(self, sample: Sample) -> None:
        self._run.add(sample, time.monotonic())
        size, epoch = sample.size, sample.epoch
        for rank in range(1, size if sample.steps is not None else 1):
            other = Sample(rank, size, epoch, _UNKNOWN, 0, sample.time, sample.began, counters={})
            self._run.add(other, time.monotonic())


def check_path(path: Path, asked_by: str = "--report") -> None:
    """Raise ArgumentError, before a job starts, if its report cannot be written."""
    if path.suffix not in (".html", ".htm"):
        raise ArgumentError(f"{asked_by} {path}: the name has to end with .html")
    if path.is_dir():
        raise ArgumentError(f"{asked_by} {path}: this is a folder")
    try:
        with TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ArgumentError(
            f"{asked_by} {path}: no file can be written there: {error.strerror}"
        ) from None


@dataclass(frozen=True)
class Record:
    """A job that runs or has ended."""

    about: About
    end: End | None  # None while the job runs
    seconds: float  # that the job has run
    # Those of the last minute while the job runs. At its end those of the last epoch, without the
    # first second in which there were steps, unless that second has most of them. None where no
    # rank has said anything.
    figures: Figures | None
    findings: list[Finding]  # empty without figures
    what_if: str  # see `findings.what_if`
    events: list[Event]  # the last ones, the oldest first
    history: dict[int, list[Sample]]  # by rank, some hundreds of samples of the last epoch
    lost: int  # lines of the ranks that could not be read

    @classmethod
    def of(cls, run: Run, about: About, end: End | None, now: float, seconds: float) -> Record:
        """Take what is to be kept of a run; `now` is a monotonic time of this process."""
        figures = run.figures(_SPAN, now) if end is None else _steady_figures(run, now)
        if figures is not None and end is not None and not end.status:
            # A rank that ended before the others did is not silent.
            figures = replace(
                figures, ranks=tuple(replace(one, silent=0.0) for one in figures.ranks)
            )
        findings, supposed = ([], "") if figures is None else (find(figures), what_if(figures))
        events = sorted(run.events(), key=lambda event: event.time)
        return cls(
            about, end, seconds, figures, findings, supposed, events, run.history(), run.lost
        )

    @property
    def origin(self) -> float:
        """The time of the ranks' clock from which a report counts."""
        times = [sample.began for points in self.history.values() for sample in points[:1]]
        return min(times + [event.time for event in self.events], default=0.0)

    def to_json(self) -> str:
        rows = [_columns(sample) for points in self.history.values() for sample in points]
        fields = {
            "hvdlite_report": _VERSION,
            **asdict(replace(self, history={})),
            "history": {"columns": _COLUMNS, "rows": rows},
        }
        return json.dumps(_finite(fields), allow_nan=False, separators=(",", ":")) + "\n"


def _steady_figures(run: Run, now: float) -> Figures | None:
    """Return the figures of the last epoch, without its warm-up where it is long enough."""
    # In its first steps a process imports, compiles and fills caches.
    whole = run.figures(math.inf, now)
    points = [(one.time, one.steps.count) for one in run.history().get(0, []) if one.steps]
    warm = next(((time, count) for time, count in points if count), None)
    if whole is None or warm is None or points[-1][1] - warm[1] < warm[1]:
        return whole
    steady = run.figures(points[-1][0] - warm[0], now)
    return None if steady is None else replace(steady, events=whole.events)


_COLUMNS = ("rank", "time", "samples", "bytes", "cpu", "steps", "step_seconds")


def _columns(sample: Sample) -> tuple[float, ...]:
    steps = (sample.steps.count, sample.steps.seconds) if sample.steps is not None else (0, 0)
    moved = sample.counters.get("bytes", 0)
    return (sample.rank, sample.time, sample.samples, moved, sample.cpu, *steps)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, such as a loss that is NaN, by None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(record: Record, path: Path, late: float = 0.0) -> None:
    """Write the HTML file, and at the end of a job the JSON file, each whole or not at all."""
    if record.end is not None:
        _replace(path.with_suffix(".json"), record.to_json())
    _replace(path, page(record, late))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(text.encode(errors="replace"))
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def page(record: Record, late: float = 0.0) -> str:
    """Return the report as HTML; a page of a job that runs is late after so many seconds."""
    style = (files("hvdlite.live") / "report.css").read_text(encoding="utf-8")
    title = escape(f"{record.about.program}: report")
    safe = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head, script, state = "", "", ""
    if record.end is None:
        head = '<noscript><meta http-equiv="refresh" content="5"></noscript>\n'
        script = (files("hvdlite.live") / "report.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        safe += f"; script-src 'sha256-{digest}'"
        script = f"<script>{script}</script>\n"
        state = f' data-written="{1000 * time.time():.0f}" data-late="{late:.0f}"'
    parts = [
        _header(record),
        *_headline(record),
        *_findings(record),
        *_ranks(record),
        *_charts(record),
        *_events(record),
        *_command(record),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"{state}>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{safe}">\n{head}'
        f'<title>{title}</title>\n<link rel="icon" href="{_ICON}">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f"\n{script}</body>\n</html>\n"
    )


def _header(record: Record) -> str:
    end = record.end
    written = time.strftime("written %H:%M:%S %Z", time.localtime())
    if end is None:
        kind, words = "running", f"running, {written}"
    elif not end.status:
        kind, words = "ended", "The job succeeded."
    else:
        why = f": {end.why}" if end.why else ""
        kind, words = "failed", f"The job ended with status {end.status}{why}"
    return (
        f'<header><h1>{escape(record.about.program)}</h1> <p id="status" class="{kind}" '
        f'role="status" data-written="{escape(written)}">{escape(words)}</p></header>'
    )


def _headline(record: Record) -> list[str]:
    figures, about = record.figures, record.about
    facts = []
    if figures is not None and figures.total_steps:
        facts += [("steps", f"{figures.total_steps:,}"), ("steps/s", number(figures.rate))]
        facts.append(("time of a step", time_text(figures.step)))
        if figures.samples:
            facts.append(("samples/s", number(figures.samples)))
        facts.append(("bytes/s", bytes_text(figures.bytes)))
    hosts = {*about.hosts} if figures is None else {rank.host for rank in figures.ranks}
    facts.append(("ranks", str(about.ranks if figures is None else figures.size)))
    if _UNKNOWN not in hosts:
        facts.append(("hosts", str(len(hosts))))
    if figures is not None and figures.epoch:
        facts.append(("world", str(figures.epoch)))
    facts.append(("time", clock(record.seconds)))
    if figures is not None:
        values = list(figures.ranks[0].values.items())[:_MOST_VALUES]
        facts += [(name, f"{value:.4g}") for name, value in values]
    items = [f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts]
    return ['<dl id="headline" aria-label="The job">', *items, "</dl>"]


def _findings(record: Record) -> list[str]:
    if not record.findings:
        yet = "" if record.end is not None else " yet"
        words = f"No rank has said anything{yet}, so that nothing is known of its steps."
        return [f'<p class="box">{words}</p>']
    items = [
        f"<li><b>{escape(_sentence(finding.says))}</b> {escape(finding.remedy)}</li>"
        for finding in record.findings
    ]
    section = _section("What limits this job", "findings")
    return [*section, "<ol>", *items, "</ol>", f"<p>{escape(record.what_if)}</p></section>"]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _ranks(record: Record) -> list[str]:
    figures = record.figures
    if figures is None:
        return []
    late = straggler(figures)
    values = list(dict.fromkeys(name for rank in figures.ranks for name in rank.values))
    values = values[:_MOST_VALUES]
    keys = [
        f'<i class="key {phase}"></i>{word}' for phase, word in zip(PHASES, _SHORT, strict=True)
    ]
    head = [("", "rank"), ("text", "host"), *(("", key) for key in keys)]
    head += [("", "CPU"), ("", "mem&shy;ory"), ("wide", "last in")]
    head += [("wide", "preempted/s"), ("wide", "samples/s")]
    head += [("wide", escape(name)) for name in values]
    rows = []
    for rank in figures.ranks:
        cells = zip(head, _cells(rank, figures, values), strict=True)
        rows.append(_row("td", [(kind, escape(cell)) for (kind, _), cell in cells]))
        if figures.steps:
            rows.append(_bar(rank, len(head)))
        words = note(rank, late)
        if words:
            rows.append(f'<tr class="note"><td colspan="{len(head)}">{escape(words)}</td></tr>')
    span = "the job" if record.end is not None else f"the last {figures.seconds:.0f} s"
    title = f'Ranks <span class="small">means of {span}</span>'
    words = (
        "Times are means of one step, in ms. Backward: from the first gradient to the last. "
        "Waiting: the others are later. Communicating: what backward does not hide. Between: "
        "optimizer, data, forward."
    )
    if figures.epoch:
        words += f" All figures are those of world {figures.epoch}, the last one."
    missing = figures.size - len(figures.ranks)
    if missing:
        words += f" {count_text(missing, 'rank')} said nothing."
    if record.lost:
        words += f" {count_text(record.lost, 'line')} of the ranks could not be read."
    return [
        *_section(title, "ranks"),
        *_table(head, rows),
        f'<p class="small">{words}</p></section>',
    ]


_SHORT = ("back&shy;ward", "wait&shy;ing", "comm.", "be&shy;tween")


def _cells(rank: RankFigures, figures: Figures, values: Sequence[str]) -> list[str]:
    phases = [f"{1e3 * getattr(rank, phase):,.1f}" for phase in PHASES]
    return [
        str(rank.rank),
        rank.host,
        *(phases if figures.steps else ["-"] * len(phases)),
        percent(rank.cpu) if rank.threads else "-",
        bytes_text(rank.rss) if rank.threads else "-",
        percent(rank.last) if figures.steps else "-",
        f"{rank.switches:.0f}" if rank.threads else "-",
        f"{rank.samples:,.0f}" if rank.samples else "-",
        *(f"{rank.values[name]:.5g}" if name in rank.values else "" for name in values),
    ]


def _bar(rank: RankFigures, columns: int) -> str:
    """Return a row of a table that shows the phases of a step as lengths."""
    times = {phase: max(0.0, getattr(rank, phase)) for phase in PHASES}
    whole = sum(times.values()) or 1.0
    parts = [
        f'<i class="{phase}" style="width:{100 * seconds / whole:.1f}%"></i>'
        for phase, seconds in times.items()
    ]
    return f'<tr class="bar" aria-hidden="true"><td colspan="{columns}">{"".join(parts)}</td></tr>'


def _charts(record: Record) -> list[str]:
    """Draw the speed and the loss over time, from the first step on."""
    loss = [(one.time, one.values.get("loss", math.nan)) for one in record.history.get(0, [])]
    loss = [(time, value) for time, value in loss if abs(value) < 1e300]  # Their sums are finite.
    speed = speeds(record.history)
    while record.end is not None and not record.end.status and speed and not speed[-1][1]:
        speed.pop()  # The script did something else at its end.
    return [
        '<div id="charts">',
        *_chart(record, "Steps a second", speed),
        *_chart(record, "Loss of rank 0, smoothed", _some_of(loss), "noise"),
        "</div>",
    ]


def _chart(record: Record, title: str, points: Curve, kind: str = "") -> list[str]:
    """Draw a curve, noise behind a smoothed one, and a mark for each event.

    Nothing is drawn where the curve has no two points.
    """
    if len(points) < 2:
        return []
    texts = [f"{number(value)} at {clock(at - record.origin)}" for at, value in points]
    begin, end = points[0][0], points[-1][0]
    values = [value for _, value in points]
    low, high = min(values) if kind else 0.0, _high(values)

    def x(at: float) -> float:
        return _WIDTH * (at - begin) / (end - begin)

    def curve(values: Sequence[float], kind: str) -> str:
        at = zip(points, values, strict=True)
        y = (
            f"{x(t):.1f},{_HEIGHT * max(0, high - v) / ((high - low) or 1):.1f}" for (t, _), v in at
        )
        return f'<polyline class="{kind}" points="{" ".join(y)}"/>'

    events = [event for event in record.events if begin <= event.time <= end]
    most = f"; cut off: {texts[values.index(max(values))]}" if max(values) > high else ""
    return [
        '<figure class="box"><figcaption>',
        f'<b>{title}</b> <span class="small">{texts[-1]}{most}</span></figcaption>',
        '<div class="plot">',
        *_labels([(x(event.time) / _WIDTH, event.kind) for event in events]),
        '<div class="scale">',
        *(f"<span>{number(at)}</span>" for at in (high, (high + low) / 2, low)),
        f'</div><svg role="img" aria-label="{title}, over time" {_VIEW}>',
        *(f'<path class="grid" d="M0 {y}H{_WIDTH}"/>' for y in (0, _HEIGHT / 2, _HEIGHT)),
        curve(values, kind),
        curve(_smooth([min(value, high) for value in values]), "") if kind else "",
        *(f'<path class="event" d="M{x(event.time):.1f} 0V{_HEIGHT}"/>' for event in events),
        *(  # What a pointer is above tells its value.
            f'<path class="at" d="M{x(a):.1f} 0H{x(b):.1f}V{_HEIGHT}H{x(a):.1f}Z">'
            f"<title>{text}</title></path>"
            for ((a, _), (b, _)), text in zip(pairwise(points), texts[1:], strict=True)
        ),
        f'</svg><div class="below"><span>{clock(begin - record.origin)}</span>',
        f"<span>{clock(end - record.origin)}</span></div></div></figure>",
    ]


def _some_of(points: Curve) -> Curve:
    """Return every n-th point, of which the last one stays: about `_MOST_POINTS`, or all."""
    apart = max(1, -(-(len(points) - 1) // _MOST_POINTS))
    return points[::-1][::apart][::-1]


def _high(values: Sequence[float]) -> float:
    """Return the top of an axis, which a few spikes do not raise: they are cut off."""
    usual = sorted(values)[int(0.9 * (len(values) - 1))]
    most = max(values)
    return (min(most, 1.5 * usual) if usual > 0 and len(values) > 3 else most) or 1.0


def _smooth(values: Sequence[float]) -> list[float]:
    """Return means over a tenth of the curve, or of what there is at its ends."""
    by = -(-len(values) // 20)
    return [fmean(values[max(0, i - by) : i + by + 1]) for i in range(len(values))]


def _labels(marks: Sequence[tuple[float, str]]) -> list[str]:
    """Return words above marks, of which each has a place from 0 to 1; near ones share a label."""
    groups: list[tuple[float, list[str]]] = []
    for at, kind in sorted(marks):
        # A label stands right of its mark, and near the end left of it.
        turns = bool(groups) and groups[-1][0] < _TURN <= at
        if not groups or at - groups[-1][0] > _APART * (1 + turns):
            groups.append((at, []))
        groups[-1][1].append(kind)
    spans = []
    for at, kinds in groups:
        text = kinds[0] if len({*kinds}) == 1 else "events"
        count = f" ({len(kinds)})" if len(kinds) > 1 else ""
        side = f"left:{100 * at:.1f}%" if at < _TURN else f"right:{100 - 100 * at:.1f}%"
        spans.append(f'<span style="{side}">{escape(text)}{count}</span>')
    return ['<div class="labels">', *spans, "</div>"] if spans else []


def speeds(history: Mapping[int, Sequence[Sample]]) -> Curve:
    """Return the steps a second that `Run.history()` tells, in at most `_MOST_POINTS` intervals.

    The first one begins where the first steps are known. Each has its end, and its speed.
    """
    told = next((samples for samples in history.values() if samples[-1].steps is not None), [])
    points: Curve = [(one.time, one.steps.count) for one in told if one.steps and one.steps.count]
    kept = _some_of(points)
    # The last sample of a job may come at once after the one before, and tells little.
    least = median([b - a for (a, _), (b, _) in pairwise(kept)] or [0.0]) / 2
    return [
        (time, (count - before) / (time - since))
        for (since, before), (time, count) in pairwise(kept)
        if time - since > least
    ]


def _events(record: Record) -> list[str]:
    events = record.events
    if not events:
        return []
    head = [("", "time"), ("text", "kind"), ("", "rank"), ("text", "what happened")]
    rows = [
        _row("td", [(kind, escape(cell)) for (kind, _), cell in zip(head, cells, strict=True)])
        for cells in (_told(event, record.origin) for event in events[: -_MOST_EVENTS - 1 : -1])
    ]
    hidden = len(events) - len(rows)
    more = f'<p class="small">{count_text(hidden, "earlier event")} in the JSON file.</p>'
    return [*_section("Events", "events"), *_table(head, rows), more * bool(hidden), "</section>"]


def _told(event: Event, origin: float) -> tuple[str, ...]:
    text = event.text
    if event.name and event.name not in text:
        text = f"{event.name}: {text}"
    return clock(event.time - origin), event.kind, str(event.rank) if event.rank >= 0 else "", text


def _command(record: Record) -> list[str]:
    about = record.about
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(about.began))
    where = ", ".join(about.hosts)
    footer = f"Started {began} on {where}. hvdlite {hvdlite.__version__}."
    return [
        *_section("Command", "command"),
        f"<p><code>{escape(shlex.join(about.command))}</code></p></section>",
        f'<footer class="small">{escape(footer)}</footer>',
    ]


def _section(title: str, name: str) -> list[str]:
    return [
        f'<section id="{name}" class="box" aria-labelledby="{name}-title">',
        f'<h2 id="{name}-title">{title}</h2>',
    ]


def _table(head: Sequence[tuple[str, str]], rows: Sequence[str]) -> list[str]:
    """Return a table that scrolls in itself; a column has a class and a heading."""
    return [
        '<div class="scroll" tabindex="0"><table>',
        f"<thead>{_row('th', head)}</thead>",
        "<tbody>",
        *rows,
        "</tbody></table></div>",
    ]


def _row(tag: str, cells: Sequence[tuple[str, str]]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    texts = [
        f"<{tag}{scope}{f' class={kind}' if kind else ''}>{text}</{tag}>" for kind, text in cells
    ]
    return f"<tr>{''.join(texts)}</tr>"
