"""The screen of `hvdlite-run --live`: rows below the output of the ranks, or lines now and then.

A thread reads the run twice a second and hands rows to the launcher's console, which alone writes
to the terminal. Without a terminal, it hands over one line every ten seconds.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite.live.findings import (
    bytes_text,
    clock,
    not_called,
    note,
    number,
    percent,
    straggler,
    time_text,
)
from hvdlite.live.run import About, End, Figures, RankFigures, Run

_PERIOD = 0.5  # seconds between two looks at the run
_LINE_SECONDS = 10.0  # between two lines without a terminal
_LONGEST_END = 1.0  # seconds that the end waits for this thread and for the terminal
_SECONDS = 10.0  # that the rows are means of
_LONG_SECONDS = 60.0  # that the notes are about
# Below so many columns there is the headline alone; from so many, notes stand beside the ranks.
_NARROW, _WIDE = 60, 110
_LONGEST_HOST = 12  # columns of the name of a host
_MOST_EVENTS = 2
_FRESH = 60.0  # seconds for which an event is shown
_NO_STEPS = "-"
_BOLD, _FAINT, _YELLOW = "1", "2", "33"  # styles of rows
_HEADINGS = ("backward", "waiting", "comm.", "between", "cpu", "rss")
_COLUMNS = (8, 7, 7, 7, 6, 8)


class Terminal(Protocol):
    """The launcher's `Console`, which says what its methods do."""

    def open_region(self) -> int | None: ...
    def show(self, rows: list[tuple[str, str]]) -> None: ...
    def drained(self, timeout: float) -> bool: ...
    def say(self, text: str) -> None: ...


class Screen:
    """Shows a run on a borrowed terminal; a `Viewer`.

    `rows` says that the terminal can erase rows; if not, lines are written.
    """

    def __init__(self, terminal: Terminal, rows: bool, colour: bool) -> None:
        self._terminal = terminal
        self._rows = rows
        self._colour = colour
        self._over = threading.Event()
        self._showing = threading.Lock()  # held while rows are handed over

    def start(self, run: Run, about: About) -> None:
        self._run, self._about = run, about
        self._fd = self._terminal.open_region() if self._rows else None
        show = self._say_lines if self._fd is None else self._show_rows
        self._thread = threading.Thread(
            target=self._guard, args=(show,), name="hvdlite-screen", daemon=True
        )
        self._thread.start()

    def stop(self, end: End) -> None:
        """Erase the rows; leave one line about the whole job if it has succeeded."""
        self._over.set()
        self._thread.join(_LONGEST_END)
        if self._fd is not None:
            with self._showing:
                self._terminal.show([])
        figures = self._run.figures(math.inf, time.monotonic())
        if end.status == 0 and figures is not None and figures.total_steps:
            self._terminal.say(headline(figures, self._about, time.time()))
        self._terminal.drained(_LONGEST_END)

    def _guard(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # The job does not need its screen.
            self._terminal.show([])
            self._terminal.say(f"no live view: {type(error).__name__}: {error}")

    def _show_rows(self) -> None:
        assert self._fd is not None
        while True:
            size = os.get_terminal_size(self._fd)
            rows = draw(self._run, self._about, size.columns, size.lines, time.monotonic())
            if not self._colour:
                rows = [("", text) for _, text in rows]
            with self._showing:
                if self._over.is_set():
                    return  # The end has erased the rows, or is about to.
                self._terminal.show(rows)
            if self._over.wait(_PERIOD):
                return

    def _say_lines(self) -> None:
        while not self._over.wait(_LINE_SECONDS):
            figures = self._run.figures(_LINE_SECONDS, time.monotonic())
            if figures is not None:
                self._terminal.say(headline(figures, self._about, time.time()))


def draw(run: Run, about: About, width: int, height: int, now: float) -> list[tuple[str, str]]:
    """Draw rows, each a style and a text, which may be wider than the terminal.

    `width` and `height` are the columns and lines of the terminal; the rows take at most half of
    its lines. `now` is a monotonic time of this process.
    """
    figures = run.figures(_SECONDS, now)
    most = max(1, height // 2)
    if figures is None:
        return [("", f"{about.program}  waiting for the first samples")]
    rows = [(_BOLD, headline(figures, about, time.time()))]
    if width >= _NARROW and most >= 4:
        rows += _below(run, figures, width, most - 1, now)
    return rows[:most]


def _below(run: Run, figures: Figures, width: int, most: int, now: float) -> list[tuple[str, str]]:
    """Draw what stands below the headline, at most so many rows."""
    lasting = run.figures(_LONG_SECONDS, now) or figures
    late = straggler(lasting)
    notes = {one.rank: note(one, late) for one in lasting.ranks}
    lines = [f"{not_called(one)} for {one.seconds:.0f} s" for one in figures.stalled[:1]]
    lines += _events(run)
    if width < _WIDE:
        lines = [f"rank {rank}: {text}" for rank, text in notes.items() if text][:2] + lines
        notes = {}
    lines = lines[: max(0, most - 3)]
    ranks = _choose(figures.ranks, most - 1 - len(lines))
    cells = [_cells(one, figures, notes.get(one.rank, "")) for one in ranks]
    header, *rows = _aligned([("rank", "host", *_HEADINGS, ""), *cells])
    hidden = len(figures.ranks) - len(ranks)
    if hidden:
        rows.append(f"and {hidden} more ranks, which are less late")
    return [
        (_FAINT, header),
        *(("", row) for row in rows),
        *((_YELLOW, line) for line in lines),
    ]


def _events(run: Run) -> list[str]:
    latest = max((sample.time for sample in run.latest()), default=0.0)
    fresh = [one for one in run.events() if latest - one.time < _FRESH]
    # The launcher tells of each world, too ("worker"), and knows why it began.
    events = [one for one in fresh if one.kind != "world"]
    return [
        f"{max(0.0, latest - one.time):.0f} s ago: {one.text}" for one in events[-_MOST_EVENTS:]
    ]


def headline(figures: Figures, about: About, now: float) -> str:
    """Describe a job in one line; `now` is in seconds since 1970."""
    words = ["".join(char if char.isprintable() else "?" for char in about.program)]
    if figures.total_steps:
        words += [f"step {figures.total_steps:,}", f"{number(figures.rate)} step/s"]
    if figures.samples:
        words.append(f"{number(figures.samples)} samples/s")
    if figures.bytes:
        words.append(f"{bytes_text(figures.bytes)}/s")
    words.append(f"np {figures.size}")
    if figures.epoch:
        words.append(f"world {figures.epoch}")
    words.append(clock(max(0.0, now - about.began)))
    return "  ".join(words)


def _cells(one: RankFigures, figures: Figures, text: str) -> tuple[str, ...]:
    phases = (one.backward, one.waiting, one.communicating, one.between)
    shown = [time_text(phase) if figures.steps else _NO_STEPS for phase in phases]
    host = one.host[:_LONGEST_HOST]
    return (str(one.rank), host, *shown, percent(one.cpu), bytes_text(one.rss), text)


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    host = max(len(row[1]) for row in cells)
    return [
        f"{row[0]:<5}{row[1]:<{host}}"
        + "".join(f" {cell:>{width}}" for cell, width in zip(row[2:-1], _COLUMNS, strict=True))
        + f"  {row[-1]}"
        for row in cells
    ]


def _choose(ranks: Sequence[RankFigures], room: int) -> list[RankFigures]:
    """Choose the ranks to show, in order: all, or the latest ones and a row for the others."""
    if len(ranks) <= room:
        return list(ranks)
    latest = sorted(ranks, key=lambda one: (-one.silent, -one.last, one.waiting, one.rank))
    return sorted(latest[: max(0, room - 1)], key=lambda one: one.rank)
