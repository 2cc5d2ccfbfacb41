"""How a start waits: until a deadline, and for many connections at once in one thread.

All waits of a start use one `Deadline`, which another thread or a signal handler can also give up.
It waits in short slices, because a signal handler cannot end a system call: Python resumes the call
when the handler has returned.
"""

from __future__ import annotations

import math
import select
import selectors
import socket
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from hvdlite.errors import BootstrapError

LONGEST_SECONDS = 1e6  # 11 days; the kernel's and Python's own limits are not far above it
SLICE_SECONDS = 0.02  # the longest wait between two looks whether it was given up

_Result = TypeVar("_Result")


class GivenUpError(BootstrapError):
    """`shutdown()` was called while `init()` ran."""


def is_never(seconds: float) -> bool:
    """Return whether a timeout means "no limit": it is 0, or longer than `LONGEST_SECONDS`."""
    return seconds == 0 or seconds > LONGEST_SECONDS


def seconds_of(timeout: timedelta) -> float:
    """Return a time limit in seconds; infinity for none."""
    seconds = timeout.total_seconds()
    return math.inf if is_never(seconds) else seconds


class Deadline:
    """A point in time at which all waits end with TimeoutError; it may be infinitely far away."""

    # Any thread, and any signal handler, may call `give_up`. Waits then raise GivenUpError within
    # about 20 ms.

    def __init__(self, seconds: float, outer: Deadline | None = None) -> None:
        """Set the deadline `seconds` from now, or at infinity if `is_never(seconds)`."""
        # This deadline also ends when `outer` passes or is given up.
        at = math.inf if is_never(seconds) else time.monotonic() + seconds
        self.at: float = at if outer is None else min(at, outer.at)  # a time of `time.monotonic`
        self._outer = outer
        self.given_up = False

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline; infinite without a limit, negative when it has passed."""
        return self.at - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.seconds_left <= 0

    def give_up(self) -> None:
        self.given_up = True

    def refuse_if_given_up(self) -> None:
        if self._outer is not None:
            self._outer.refuse_if_given_up()
        if self.given_up:
            raise GivenUpError(
                "init() was given up: shutdown() was called while it ran, by a signal handler or "
                "by another thread"
            )

    def check(self, grace: float = 0.0) -> float:
        """Return how many seconds the caller may wait before it calls `check` again."""
        # `grace` gives the seconds that this wait may last beyond the deadline. GivenUpError:
        # `give_up` was called; TimeoutError: the deadline has passed.
        self.refuse_if_given_up()
        left = self.seconds_left + grace
        if left <= 0:
            raise TimeoutError("timed out")
        return min(left, SLICE_SECONDS)

    def attempt(
        self, connection: socket.socket, call: Callable[[], _Result], grace: float = 0.0
    ) -> _Result:
        """Call `call`, which waits for a socket, until it succeeds or the deadline passes."""
        # Afterwards the socket has a short timeout. It raises as `check`, and as `call`.
        while True:
            connection.settimeout(self.check(grace))
            try:
                return call()
            except TimeoutError:
                continue

    def receive(self, connection: socket.socket, most: int, grace: float = 0.0) -> bytes:
        """Receive 1 to `most` bytes, or none if the peer has hung up; raise as `attempt` does."""
        return self.attempt(connection, lambda: connection.recv(most), grace)

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Send all bytes; raise as `attempt` does."""
        view = memoryview(data)
        while view:
            view = view[self.attempt(connection, partial(connection.send, view)) :]

    def sleep(self, seconds: float) -> None:
        """Sleep `seconds`, or raise as `check` does."""
        end = time.monotonic() + seconds
        longest = self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, longest))
            longest = self.check()


class Pause(NamedTuple):
    """What steps wait for: an event, or a point in time, whichever comes first."""

    # A pause may also end early, so steps look whether they can go on, and check their deadline.

    at: float  # a time of `time.monotonic`; may be infinite
    fd: int = -1  # the descriptor whose events count; -1 for none
    events: int = 0  # They are those of `selectors`.


# What each of many connections does is a generator of steps. It yields a `Pause` where it would
# otherwise block, and goes on when the pause is over. `run` runs one such generator alone, and a
# `Loop` many, in one thread.
Steps = Generator[Pause, None, _Result]


def run(steps: Steps[_Result]) -> _Result:
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


class Loop:
    """Runs many steps in the thread that calls `turn`; what they raise comes out of `turn`."""

    # Other descriptors can be registered with the `selector`, too, with a function to call as data.

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._pauses: dict[Steps[None], Pause | None] = {}  # what each of the steps waits for

    def start(self, steps: Steps[None]) -> None:
        """Run steps up to their first pause; `turn` does the rest."""
        self._pauses[steps] = None
        self._go_on(steps)

    def turn(self, longest: float) -> None:
        """Wait until something can go on, at most `longest` seconds, and let it go on."""
        first = min((pause.at for pause in self._pauses.values() if pause), default=math.inf)
        seconds = max(0.0, min(longest, first - time.monotonic()))
        for key, _ in self.selector.select(seconds):
            handle: Callable[[], Any] = key.data
            handle()
        now = time.monotonic()
        for steps, pause in list(self._pauses.items()):
            # Steps that go on may end others, and let them wait for something else.
            if pause is not None and pause.at <= now and self._pauses.get(steps) is pause:
                self._go_on(steps)

    def close(self) -> None:
        """End all steps where they are, so that they close what they have opened."""
        for steps in list(self._pauses):
            self._end_pause(steps)
            steps.close()
        self._pauses.clear()
        self.selector.close()

    def _go_on(self, steps: Steps[None]) -> None:
        self._end_pause(steps)
        try:
            pause = next(steps)
        except BaseException as end:
            del self._pauses[steps]
            if isinstance(end, StopIteration):
                return
            raise
        self._pauses[steps] = pause
        if pause.fd >= 0:
            self.selector.register(pause.fd, pause.events, lambda: self._go_on(steps))

    def _end_pause(self, steps: Steps[None]) -> None:
        pause, self._pauses[steps] = self._pauses[steps], None
        if pause is not None and pause.fd >= 0:
            self.selector.unregister(pause.fd)
