"""The accepting side of all connections: many handshakes at once, bounded in number and time.

A *stranger* is a connection that has not proved that it belongs to this job. A stranger costs one
small object and lasts at most `HANDSHAKE_SECONDS`. However many strangers connect, a real peer is
served: the acceptor lets in at most `_AT_ONCE` connections before it serves those that are in, and
when there are too many, it drops the oldest one that has not named this job. Strangers have at most
a quarter of the files that this process may open; the rest is for its own work.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.rendezvous.address import same_user
from hvdlite.rendezvous.descriptors import explained, raise_limit
from hvdlite.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    Job,
    OtherEpochError,
    RefusedError,
    ServerHandshake,
)

_LEAST_ROOM = 256  # handshakes at once, at least
_AT_ONCE = 64  # connections accepted before those that are in are served again
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # The kernel lets nobody in.
_REST_SECONDS = 0.25  # until the acceptor tries again then


@dataclass
class _Pending:
    connection: socket.socket
    handshake: ServerHandshake
    deadline: float


class _HungUpError(RefusedError):
    """A connection ended before its handshake did."""


class Acceptor:
    """Accepts connections on one listener, and hands over those that belong to this job."""

    # The acceptor owns the listener, and owns each connection until it hands the connection over.
    # Only one thread uses it.
    # `selector` is borrowed; its owner calls the key's data for each event, and `expire` regularly.
    # With `peers_return`, peers may give up and come again in another epoch, as in elastic jobs; so
    # it is not worth a message when a peer hangs up or belongs to another epoch.
    # `room` says how many handshakes at once, if `size` only bounds the ranks; by default twice
    # `size`.

    def __init__(
        self,
        listener: socket.socket,
        job: Job,
        size: int,
        selector: selectors.BaseSelector,
        welcome: Callable[[socket.socket, ServerHandshake], None],
        peers_return: bool = False,
        room: int | None = None,
    ) -> None:
        self._listener = listener
        self._job = job
        self._size = size
        self._selector = selector
        self._welcome = welcome
        most = max(_LEAST_ROOM, 2 * size if room is None else room)
        self._room = min(most, raise_limit(4 * most) // 4)
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._untold = (OtherEpochError, _HungUpError) if peers_return else ()
        self._told: set[str] = set()  # what was said already
        self._rests_until: float | None = None  # None while the acceptor listens
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self) -> None:
        """Drop connections whose handshake took too long."""
        now = time.monotonic()
        if self._rests_until is not None and now >= self._rests_until:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while self._pending:
            first = next(iter(self._pending.values()))
            if first.deadline > now:
                return
            self._drop(first)

    def close(self) -> None:
        """Stop accepting; connections that were handed over stay open."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        if self._rests_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _FULL:
                    self._rest(error.errno)
                return  # Otherwise no connection waits any more, or the stranger has hung up.
            if not same_user(connection):
                connection.close()
                continue
            if len(self._pending) >= self._room:
                self._advance(self._least_welcome())  # It may have spoken meanwhile.
            if len(self._pending) >= self._room:
                self._drop(self._least_welcome())
            connection.setblocking(False)
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            pending = _Pending(connection, ServerHandshake(self._job, self._size), deadline)
            self._pending[connection.fileno()] = pending
            self._selector.register(
                connection, selectors.EVENT_READ, lambda p=pending: self._advance(p)
            )

    def _rest(self, number: int) -> None:
        """Let connections wait: this process, or the machine, can open no more files."""
        if self._pending:
            self._drop(self._least_welcome())
        self._selector.unregister(self._listener)
        self._rests_until = time.monotonic() + _REST_SECONDS
        self._tell(f"connections have to wait: {explained(OSError(number, os.strerror(number)))}")

    def _tell(self, text: str) -> None:
        """Say something once."""
        kind = text.partition(":")[0]
        if kind not in self._told:
            self._told.add(kind)
            print(f"hvdlite: {text} (said once)", file=sys.stderr)

    def _least_welcome(self) -> _Pending:
        """Choose the connection to drop: the oldest that has not named this job, or any."""
        # A stranger that has named the job is possible: over TCP it may have read the job's id.
        waiting = self._pending.values()
        strangers = (pending for pending in waiting if not pending.handshake.transcript)
        return next(strangers, next(iter(waiting)))

    def _advance(self, pending: _Pending) -> None:
        if self._pending.get(pending.connection.fileno()) is not pending:
            return  # An earlier event of this turn had it dropped.
        try:
            data = pending.connection.recv(pending.handshake.wanted())
            if not data:
                raise _HungUpError("a process hung up before it had said who it is")
            answer = pending.handshake.feed(data)
            # Replies are far smaller than any socket's buffer.
            pending.connection.sendall(answer)
        except BlockingIOError:
            return
        except (OSError, RefusedError) as error:
            self._refuse(pending, error)
            return
        if pending.handshake.done:
            self._forget(pending)
            pending.connection.setblocking(True)
            self._welcome(pending.connection, pending.handshake)

    def _refuse(self, pending: _Pending, why: Exception) -> None:
        if pending.handshake.refusal is not None:
            try:
                pending.connection.sendall(pending.handshake.refusal)
            except OSError:
                pass  # The peer did not wait for the reason.
        if not isinstance(why, (OSError, *self._untold)):
            self._tell(f"refused a connection: {why}")
        self._drop(pending)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]
