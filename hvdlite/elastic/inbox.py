"""What the membership thread sleeps on: the registrar's messages, and the end of a world."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from typing import Any

Message = dict[str, Any]
LOST: Message = {"kind": "lost"}  # This worker's world has ended by a failure.


class Inbox:
    """A queue of messages from any thread to the membership thread."""

    def __init__(self, lost_fd: int) -> None:
        """Make an empty inbox; it brings `LOST` when the borrowed eventfd `lost_fd` is written."""
        self._messages: deque[Message] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lost_fd = lost_fd

    def put(self, message: Message) -> None:
        """Add a message behind the others; any thread may call it."""
        self._messages.append(message)
        os.eventfd_write(self._event, 1)

    def put_back(self, message: Message) -> None:
        """Add a message before the others, which the membership thread has taken too early."""
        self._messages.appendleft(message)
        os.eventfd_write(self._event, 1)

    def take(self, timeout: float | None = None) -> Message | None:
        """Wait for the next message and return it; None if `timeout` seconds have passed first."""
        while True:
            with contextlib.suppress(IndexError):
                return self._messages.popleft()
            milliseconds = None if timeout is None else 1000 * timeout
            poller = select.poll()
            poller.register(self._event, select.POLLIN)
            poller.register(self._lost_fd, select.POLLIN)
            ready = [fd for fd, _ in poller.poll(milliseconds)]
            if not ready:
                return None
            for fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            if self._lost_fd in ready:
                self._messages.append(LOST)
