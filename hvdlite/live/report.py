"""`hvdlite-run --report`: one HTML file without script, made when a job has ended, well or badly.

What comes from ranks and scripts (names of hosts, tensors and values, texts of events, the command)
is escaped: it is text, and never markup.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryFile

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.live.record import Record
from hvdlite.live.run import Figures, RankFigures, Run
from hvdlite.live.sample import Event
from hvdlite.live.viewer import About, End
from hvdlite.live.words import bytes_text, percent, time_text

_MOST_EVENTS = 200  # The table has so many; the JSON file has all.
_MOST_VALUES = 8  # The table of ranks has so many columns for `hvd.observe`.

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
ol.findings { padding: 0; list-style: none; }
ol.findings li { margin: 0.8rem 0; padding-left: 0.8rem; border-left: 4px solid #4477aa; }
ol.findings b { display: block; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; }
th { font-weight: 600; } .text { text-align: left; white-space: normal; }
code { overflow-wrap: anywhere; }
.charts { overflow-x: auto; } svg { max-width: 100%; min-width: 40rem; height: auto; }
footer { color: #666; font-size: 0.85rem; margin-top: 2rem; }
"""


class Report:
    """Writes the report of a job when it has ended; a `Viewer`."""

    def __init__(self, path: Path, baseline: Figures | None, say: Callable[[str], None]) -> None:
        """Make a viewer that writes nothing yet; `path` names the HTML file."""
        # The JSON file has the same name, but for the suffix.
        self._path = path.absolute()
        self._shown = path
        self._baseline = baseline
        self._say = say

    def start(self, run: Run, about: About) -> None:
        """Keep the run until its end."""
        self._run, self._about = run, about
        self._began = time.monotonic()

    def stop(self, end: End) -> None:
        """Write the files, and say where they are; say in one line why not, if that fails."""
        now = time.monotonic()
        record = Record.of(self._run, self._about, end, now, now - self._began, self._baseline)
        try:
            write(record, self._path)
        except OSError as error:
            self._say(f"there is no report in {self._shown}: {error.strerror or error}")
            return
        says = f": {record.findings[0].says}" if record.findings else ""
        self._say(f"report in {self._shown}{says}")


def check_path(path: Path) -> None:
    """Raise ArgumentError, before a job starts, if its report cannot be written."""
    if path.suffix not in (".html", ".htm"):
        raise ArgumentError(f"--report {path}: the name has to end with .html")
    if path.is_dir():
        raise ArgumentError(f"--report {path}: this is a folder")
    try:
        with TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ArgumentError(
            f"--report {path}: no file can be written there: {error.strerror}"
        ) from None


def write(record: Record, path: Path) -> None:
    """Write the HTML file, and the JSON file beside it, each of them whole or not at all."""
    _replace(path.with_suffix(".json"), record.to_json())
    _replace(path, page(record))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(text.encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def page(record: Record) -> str:
    """Return the report as HTML."""
    title = f"{record.about.program}: report"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_outcome(record))}</p>",
        *_findings(record),
        *_ranks(record),
        *_charts(record),
        *_event_table(record.events, record.origin),
        *_command(record),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _outcome(record: Record) -> str:
    about, end, figures = record.about, record.end, record.figures
    ranks = figures.size if figures is not None else about.ranks
    hosts = len({rank.host for rank in figures.ranks}) if figures is not None else len(about.hosts)
    words = f"{_count(ranks, 'rank')} on {_count(hosts, 'host')}, {_duration(record.seconds)}"
    if figures is not None and figures.steps:
        words += f", {_count(figures.total_steps, 'step')}, {time_text(figures.step)} each"
        if figures.samples_per_step:
            words += f", {figures.samples_per_step * figures.rate:,.0f} samples/s"
        if figures.bytes:
            words += f", {bytes_text(figures.bytes)}/s of a rank"
    if not end.status:
        return f"The job succeeded: {words}."
    return f"The job ended with status {end.status}{f': {end.why}' if end.why else ''} ({words})."


def _findings(record: Record) -> list[str]:
    if not record.findings:
        return ["<p>No rank has said anything, so that nothing is known of its steps.</p>"]
    items = [
        f"<li><b>{escape(_sentence(finding.says))}</b>{escape(finding.remedy)}</li>"
        for finding in record.findings
    ]
    return ["<h2>What limits it</h2>", '<ol class="findings">', *items, "</ol>"]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _ranks(record: Record) -> list[str]:
    figures = record.figures
    if figures is None:
        return []
    values = list(dict.fromkeys(name for rank in figures.ranks for name in rank.values))
    values = values[:_MOST_VALUES]
    names = ["rank", "host", "backward", "waiting", "communicating", "between", "last in"]
    names += ["cpu", "memory", "preempted/s", "samples/s", *values]
    rows = [_cells(rank, figures, values) for rank in figures.ranks]
    note = "Times are means of a step. "
    if figures.epoch:
        note += f"All figures are those of epoch {figures.epoch}, the last one. "
    missing = figures.size - len(figures.ranks)
    if missing:
        note += f"{_count(missing, 'rank')} said nothing. "
    if record.lost:
        note += f"{_count(record.lost, 'line')} of the ranks could not be read. "
    return ["<h2>Ranks</h2>", *_table(names, rows), f"<p>{note.strip()}</p>"]


def _cells(rank: RankFigures, figures: Figures, values: Sequence[str]) -> list[str]:
    phases = (rank.backward, rank.waiting, rank.communicating, rank.between)
    return [
        str(rank.rank),
        rank.host,
        *(time_text(phase) if figures.steps else "-" for phase in phases),
        percent(rank.last) if figures.steps else "-",
        percent(rank.cpu),
        bytes_text(rank.rss),
        f"{rank.switches:.0f}",
        f"{rank.samples:,.0f}" if rank.samples else "-",
        *(f"{rank.values[name]:.5g}" if name in rank.values else "" for name in values),
    ]


def _charts(record: Record) -> list[str]:
    if record.figures is None:
        return []
    try:
        from hvdlite.live.charts import MOST_RANKS, draw

        svg = draw(record)
    except Exception as error:  # The words and tables are worth keeping without charts.
        return [f"<p>There are no charts: {escape(f'{type(error).__name__}: {error}')}</p>"]
    hidden = len(record.figures.ranks) - MOST_RANKS
    note = "Vertical lines are events." if record.events else ""
    if hidden > 0:
        note = f"The first chart shows the {MOST_RANKS} ranks that were the last most often. {note}"
    return ["<h2>Charts</h2>", f'<div class="charts">{svg}</div>', f"<p>{note.strip()}</p>"]


def _event_table(events: Sequence[Event], origin: float) -> list[str]:
    if not events:
        return []
    rows = [
        [
            f"{event.time - origin:.1f} s",
            event.kind,
            str(event.rank) if event.rank >= 0 else "",
            event.name,
            event.text,
        ]
        for event in events[-_MOST_EVENTS:]
    ]
    hidden = len(events) - len(rows)
    note = [f"<p>{_count(hidden, 'earlier event')}: see the JSON file.</p>"] if hidden else []
    return ["<h2>Events</h2>", *_table(["after", "kind", "rank", "name", "text"], rows), *note]


def _command(record: Record) -> list[str]:
    about = record.about
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(about.began))
    where = ", ".join(about.hosts)
    footer = f"Started {began} on {where}. hvdlite {hvdlite.__version__}."
    return [
        "<h2>Command</h2>",
        f"<p><code>{escape(shlex.join(about.command))}</code></p>",
        f"<footer>{escape(footer)}</footer>",
    ]


_WORDS = frozenset(("host", "kind", "name", "text"))  # These columns are not numbers.


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def row(tag: str, cells: Sequence[str]) -> str:
        marks = (' class="text"' if name in _WORDS else "" for name in names)
        cells = [
            f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True)
        ]
        return f"<tr>{''.join(cells)}</tr>"

    body = [row("td", cells) for cells in rows]
    return [
        '<div class="table"><table>',
        f"<thead>{row('th', names)}</thead>",
        "<tbody>",
        *body,
        "</tbody></table></div>",
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
