"""The launcher's side of a view of the job: it collects the ranks' samples for the viewers.

Each rank writes a line a second to a pipe of its own (sink LIVE). What a rank writes there is not
trusted to be a sample, and what fails in a viewer does not reach the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hvdlite.launch.console import Console
from hvdlite.live.run import About, End, Run, Viewer
from hvdlite.live.sample import Event, Sample

_LONGEST_LINE = 256 << 10  # bytes; a sample of rank 0 takes some 70 for each rank


MakeViewer: TypeAlias = Callable[[Console], Viewer]


class View:
    """A view of one job. The launcher's thread calls its methods.

    Each of `makers` makes a viewer, which may write to the borrowed console.
    """

    def __init__(self, makers: Sequence[MakeViewer], console: Console) -> None:
        self.run = Run()  # what is known of the job; viewers read it
        self._console = console
        self._viewers: list[Viewer] = []
        self._rests: dict[int, bytes] = {}  # by pipe, the beginning of a line
        # By pipe, the last epoch and its rank there, which is one: so the run stays bounded.
        self._ranks: dict[int, tuple[int, int]] = {}
        self._ahead = 0.0  # seconds that rank 0's clock is ahead
        for make in makers:
            self._guard(lambda make=make: self._viewers.append(make(console)))

    def start(self, about: About) -> None:
        """Start the viewers, before the ranks."""
        self._viewers = [one for one in self._viewers if self._guard(one.start, self.run, about)]

    def stop(self, end: End) -> None:
        """Stop the viewers, when the ranks have ended and the launcher has shown why."""
        viewers, self._viewers = self._viewers, []
        for viewer in viewers:
            self._guard(viewer.stop, end)

    def took(self, number: int, block: bytes) -> None:
        """Take bytes that came through the pipe of a rank, or of a worker of an elastic job."""
        *lines, rest = (self._rests.get(number, b"") + block).split(b"\n")
        for line in lines:
            self._add(number, line)
        self._rests[number] = rest[: _LONGEST_LINE + 1]  # The memory of an endless line is bounded.

    def closed(self, number: int) -> None:
        if len(self._rests.pop(number, b"")) > _LONGEST_LINE:
            self.run.lost += 1
        self._ranks.pop(number, None)

    def note(self, kind: str, rank: int, text: str) -> None:
        """Add an event that the launcher has seen, such as the death of a worker."""
        self.run.note(Event(time.monotonic() + self._ahead, kind, rank, "", text))

    def _add(self, number: int, line: bytes) -> None:
        now = time.monotonic()
        try:
            if len(line) > _LONGEST_LINE:
                raise ValueError("this is not a sample: it is too long")
            sample = Sample.parse(line)
            epoch, rank = self._ranks.setdefault(number, (sample.epoch, sample.rank))
            if epoch < sample.epoch:
                self._ranks[number] = (sample.epoch, sample.rank)
            elif rank != sample.rank:
                raise ValueError("a process has one rank in an epoch")
            self.run.add(sample, now)
        except Exception:  # A rank can write anything, and the launcher goes on.
            self.run.lost += 1
        else:
            self._ahead = sample.time - now

    def _guard(self, call: Callable[..., None], *arguments: object) -> bool:
        """Call a viewer; show what it raises as one line, and return whether it raised nothing."""
        try:
            call(*arguments)
        except Exception as error:
            self._console.say(f"no live view: {type(error).__name__}: {error}")
            return False
        return True
