"""How a start waits: until a deadline.

All waits of a start use one `Deadline`, which another thread or a signal handler can also give up.
It waits in short slices, because a signal handler cannot end a system call: Python resumes the call
when the handler has returned.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

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
