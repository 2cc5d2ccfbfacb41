"""Signals to the launcher, as events of its loop."""

from __future__ import annotations

import os
import signal
import threading

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Turn signals to the launcher into bytes on a descriptor, while entered.

    Only a process's main thread can: entered elsewhere (a notebook's worker), it stays silent.
    """

    def __init__(self) -> None:
        """Prepare the descriptor; nothing is caught yet."""
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[int, object]] = []
        self._wakeup_before = -1

    def __enter__(self) -> SignalInbox:
        """Catch what is watched (and not ignored by whoever started us, as nohup does)."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _WATCHED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before.append((number, signal.signal(number, lambda *_: None)))
        return self

    def __exit__(self, *_: object) -> None:
        """Catch no more."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.fd)
        os.close(self._write)

    def take(self) -> list[int]:
        """List the signals that came."""
        try:
            return [number for number in os.read(self.fd, 64) if number in _WATCHED]
        except BlockingIOError:
            return []
