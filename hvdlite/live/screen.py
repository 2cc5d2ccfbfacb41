"""The screen of `hvdlite-run --live`: rows below the output of the ranks, or lines now and then.

A thread reads the run twice a second and hands rows of bytes to the launcher's console, which alone
writes to the terminal. Without a terminal, it hands over one line every ten seconds.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from hvdlite.live.rows import Painter, headline
from hvdlite.live.run import About, End, Run

_PERIOD = 0.5  # seconds between two looks at the run
_LINE_SECONDS = 10.0  # Two lines are so far apart without a terminal.
_LONGEST_END = 1.0  # seconds that the end waits for this thread and for the terminal


class Terminal(Protocol):
    """The launcher's console."""

    def open_region(self) -> int | None:
        """Begin to keep rows below the output; return the descriptor of the terminal, if any."""

    def show(self, rows: list[bytes], width: int) -> None:
        """Show these rows below the output, made for a terminal of this width; none: erase them."""

    def drained(self, timeout: float) -> bool:
        """Wait until all is written."""

    def say(self, text: str) -> None:
        """Write a line to stderr."""


class Screen:
    """Shows a run on a terminal; a `Viewer`."""

    def __init__(self, terminal: Terminal, rows: bool = True, colour: bool = True) -> None:
        """Make a screen that shows nothing yet, on a borrowed terminal."""
        # `rows` says that the terminal can erase rows; if not, lines are written.
        self._terminal = terminal
        self._rows = rows
        self._colour = colour
        self._over = threading.Event()
        self._showing = threading.Lock()  # held while rows are handed over
        self._thread: threading.Thread | None = None

    def start(self, run: Run, about: About) -> None:
        """Begin to show a run."""
        self._run, self._about = run, about
        self._fd = self._terminal.open_region() if self._rows else None
        show = self._say_lines if self._fd is None else self._show_rows
        self._thread = threading.Thread(target=self._guard, args=(show,), name="hvdlite-screen")
        self._thread.daemon = True
        self._thread.start()

    def stop(self, end: End) -> None:
        """Erase the rows; leave one line about the whole job if it has succeeded."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_LONGEST_END)
        if self._fd is not None:
            with self._showing:
                self._terminal.show([], 0)
        figures = self._run.figures(math.inf, time.monotonic())
        if end.status == 0 and figures is not None and figures.total_steps:
            self._terminal.say(headline(figures, self._about, time.time()))
        self._terminal.drained(_LONGEST_END)

    def _guard(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # The job does not need its screen.
            self._terminal.show([], 0)
            self._terminal.say(f"no live view: {type(error).__name__}: {error}")

    def _show_rows(self) -> None:
        assert self._fd is not None
        painter = Painter(self._run, self._about, self._colour)
        while True:
            size = os.get_terminal_size(self._fd)
            rows = painter.rows(size.columns, size.lines, time.monotonic())
            with self._showing:
                if self._over.is_set():
                    return  # The end has erased the rows, or is about to.
                self._terminal.show(rows, size.columns)
            if self._over.wait(_PERIOD):
                return

    def _say_lines(self) -> None:
        while not self._over.wait(_LINE_SECONDS):
            figures = self._run.figures(_LINE_SECONDS, time.monotonic())
            if figures is not None:
                self._terminal.say(headline(figures, self._about, time.time()))
