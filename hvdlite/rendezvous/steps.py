"""Many connections at once in one thread: what each of them does is a generator of steps.

A generator yields a `Pause` where it would otherwise block, and goes on when the pause is over.
`run` runs one such generator alone; a `Loop` runs many.
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
import selectors
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from hvdlite.rendezvous.deadline import SLICE_SECONDS, Deadline


class Pause(NamedTuple):
    """What steps wait for: an event, or a point in time, whichever comes first."""

    # A pause may also end early, so steps look whether they can go on, and check their deadline.

    at: float  # a time of `time.monotonic`; may be infinite
    fd: int = -1  # the descriptor whose events count; -1 for none
    events: int = 0  # They are those of `selectors`.


_Result = TypeVar("_Result")
Steps = Generator[Pause, None, _Result]


def run(steps: Steps[_Result]) -> _Result:
    """Run steps to their end, and return what they return, or raise what they raise."""
    try:
        while True:
            _wait(next(steps))
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        steps.close()


def sleeping(seconds: float, deadline: Deadline) -> Steps[None]:
    """Pause for `seconds`; raise as `deadline.check` does."""
    end = time.monotonic() + seconds
    deadline.check()
    while time.monotonic() < end:
        yield Pause(min(end, deadline.at))
        deadline.check()


def _wait(pause: Pause) -> None:
    seconds = max(0.0, min(pause.at - time.monotonic(), SLICE_SECONDS))
    if pause.fd < 0:
        time.sleep(seconds)
        return
    poller = select.poll()
    reads = select.POLLIN if pause.events & selectors.EVENT_READ else 0
    writes = select.POLLOUT if pause.events & selectors.EVENT_WRITE else 0
    poller.register(pause.fd, reads | writes)
    poller.poll(1000 * seconds)


class _Task:
    """Steps that run in a loop, and what they wait for."""

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.pause: Pause | None = None


class Loop:
    """Runs many steps in the thread that calls `turn`; what they raise comes out of `turn`."""

    # Other descriptors can be registered with the `selector`, too, with a function to call as data.

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._tasks: set[_Task] = set()
        self._timers: list[tuple[float, int, _Task, Pause]] = []
        self._numbers = itertools.count()

    def start(self, steps: Steps[None]) -> None:
        """Run steps up to their first pause; `turn` does the rest."""
        task = _Task(steps)
        self._tasks.add(task)
        self._go_on(task)

    def turn(self, longest: float) -> None:
        """Wait until something can go on, at most `longest` seconds, and let it go on."""
        seconds = max(0.0, min(longest, self._next_timer() - time.monotonic()))
        for key, _ in self.selector.select(seconds):
            handle: Callable[[], Any] = key.data
            handle()
        now = time.monotonic()
        while self._next_timer() <= now:
            _, _, task, _ = heapq.heappop(self._timers)
            self._go_on(task)

    def close(self) -> None:
        """End all steps where they are, so that they close what they have opened."""
        for task in list(self._tasks):
            self._end_pause(task)
            task.steps.close()
        self._tasks.clear()
        self.selector.close()

    def _next_timer(self) -> float:
        while self._timers:
            at, _, task, pause = self._timers[0]
            if task.pause is pause:
                return at
            heapq.heappop(self._timers)  # That pause has ended by its event.
        return math.inf

    def _go_on(self, task: _Task) -> None:
        self._end_pause(task)
        try:
            pause = next(task.steps)
        except BaseException as end:
            self._tasks.discard(task)
            if isinstance(end, StopIteration):
                return
            raise
        task.pause = pause
        if pause.fd >= 0:
            self.selector.register(pause.fd, pause.events, lambda: self._go_on(task))
        if pause.at < math.inf:
            heapq.heappush(self._timers, (pause.at, next(self._numbers), task, pause))

    def _end_pause(self, task: _Task) -> None:
        pause, task.pause = task.pause, None
        if pause is not None and pause.fd >= 0:
            self.selector.unregister(pause.fd)
