"""Signals to the launcher, as events of its loop."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = signal.SIGUSR1  # the launcher sends it on to the ranks, which may stop at it
_TOLD = b"\0"  # on the descriptor instead of a number: another host has told of a signal


class SignalInbox:
    """A context manager that turns signals to the launcher into bytes on the descriptor `fd`."""

    # Only the main thread of a process can catch signals. If another thread enters it (in some
    # notebooks), no signals arrive.

    def __init__(self, passes_on: bool = False) -> None:
        """Make the descriptor; no signal is caught yet."""
        # `passes_on` also catches `PASSED_ON`, unless this process has a handler for it.
        self._passes_on = passes_on
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[int, object]] = []
        self._wakeup_before = -1
        self._told: deque[tuple[str, int]] = deque()

    def __enter__(self) -> SignalInbox:
        """Catch the watched signals, except those that this process ignores (under nohup)."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _WATCHED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before.append((number, signal.signal(number, lambda *_: None)))
        if self._passes_on and signal.getsignal(PASSED_ON) == signal.SIG_DFL:
            self._before.append((PASSED_ON, signal.signal(PASSED_ON, lambda *_: None)))
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.fd)
        os.close(self._write)

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call."""
        try:
            caught = {number for number, _ in self._before}
            return [number for number in os.read(self.fd, 64) if number in caught]
        except BlockingIOError:
            return []

    def tell(self, host: str, number: int) -> None:
        """Note a signal that another host got; any thread may call this."""
        self._told.append((host, number))
        try:
            os.write(self._write, _TOLD)
        except OSError:
            pass  # The descriptor is readable already, or the job is over.

    def take_told(self) -> list[tuple[str, int]]:
        """Return the hosts and signals that were told since the last call."""
        return [self._told.popleft() for _ in range(len(self._told))]
