"""Connections of viewers: how many, how long until they ask, how long they may not read."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256  # There are at most so many connections.
PATIENCE = 10.0  # seconds


class Connection(H11Protocol):
    """A connection that ends if its viewer sends no request, or does not read, for a while."""

    # The data that wait for a viewer are at most asyncio's buffer of 64 KiB and the socket's.

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
            return
        self._timer = self.loop.call_later(PATIENCE, self._end_if_mute)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_no_more()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait until the viewer reads."""
        super().pause_writing()
        self._wait_no_more()
        self._timer = self.loop.call_later(PATIENCE, self.transport.abort)

    def resume_writing(self) -> None:
        """The viewer reads again."""
        self._wait_no_more()
        super().resume_writing()

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_if_mute(self) -> None:
        if self.cycle is None:
            self.transport.abort()
