"""The page of a job whose launcher is not hvdlite-run: rank 0 alone serves it.

Rank 0 knows the phases of all ranks. What their processes use, and on which hosts they are, it does
not know: the page shows that as unknown, and the metrics leave it out.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hvdlite.live.listener import open_listener
from hvdlite.live.page import Page
from hvdlite.live.run import Run
from hvdlite.live.sample import Sample
from hvdlite.live.viewer import About, End

_LONGEST_END = 0.5  # seconds until the last sample has been read


class Service:
    """A page, and the pipe through which it gets the samples of this process."""

    def __init__(self, address: str, token_file: Path | None, say: Callable[[str], None]) -> None:
        """Listen at "host:port", but do not answer yet; without a file, a token is drawn."""
        # The call raises ArgumentError if the address or the file cannot be used.
        self._page = Page(open_listener(address, token_file), say)
        self._run = Run()
        # A `Reporter` gets the write end, `pipe`.
        self._source, self.pipe = os.pipe()
        self._reader = threading.Thread(target=self._read, name="hvdlite-serve", daemon=True)

    def start(self, about: About) -> None:
        """Begin to serve."""
        self._reader.start()
        self._page.start(self._run, about)

    def stop(self) -> None:
        """Tell the pages that this process ends."""
        os.close(self.pipe)
        self._reader.join(_LONGEST_END)  # A child of fork() may hold the pipe open.
        self._page.stop(_end())

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # They are for the script.
        with open(self._source, "rb") as lines:
            for line in lines:
                try:
                    sample = Sample.parse(line)
                except ValueError:
                    self._run.lose()
                    continue
                for one in (sample, *others(sample)):
                    self._run.add(one, time.monotonic())


def _end() -> End:
    """Return how this process ends; an exception that no code caught stays in `sys`."""
    error = getattr(sys, "last_value", None)
    return End(0, "") if error is None else End(1, f"rank 0: {type(error).__name__}: {error}")


def others(sample: Sample) -> Iterator[Sample]:
    """Give samples of the ranks that rank 0 has timed; they say nothing of their processes."""
    if sample.steps is not None:
        unknown = Sample(
            rank=0,
            size=sample.size,
            epoch=sample.epoch,
            host="an unknown host",
            pid=0,
            time=sample.time,
            began=sample.began,
            counters={},
        )
        for rank in range(1, len(sample.steps.ranks)):
            yield replace(unknown, rank=rank)
