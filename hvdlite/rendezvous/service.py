"""A service by which the processes of a job meet: its connections, its clock and its thread.

Clients prove by the handshake that they belong to the job. Then both sides send JSON objects with a
"kind", in frames. What these mean is up to the subclass: `store.Store` for ranks whose number is
fixed, `hvdlite.launch.elastic.registrar.Registrar` for workers that come and go.

The accepting side of all connections is an `Acceptor`. However many *strangers* connect, which have
not proved that they belong to this job, a real peer is served: there are many handshakes at once,
bounded in number and time, and the oldest connection that has not named this job is dropped first.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import address_of, same_user
from hvdlite.rendezvous.descriptors import explained, raise_limit
from hvdlite.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    FrameReader,
    FrameWriter,
    Job,
    OtherEpochError,
    RefusedError,
    Role,
    ServerHandshake,
    session_keys,
)

_TICK_SECONDS = 0.25  # the longest sleep, as the acceptor drops slow strangers in between
_FLUSH_SECONDS = 2.0  # A connection lasts so long after its last message.
_MAX_BACKLOG_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_LEAST_ROOM = 256  # handshakes at once, at least
_AT_ONCE = 64  # connections accepted before those that are in are served again
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # The kernel lets nobody in.
_REST_SECONDS = 0.25  # until the acceptor tries again then


_Self = TypeVar("_Self", bound="Service")


class Service:
    """Serves one job from a daemon thread; a context manager, which closes it."""

    # Any thread may call `close` and `_wake`. All else runs in the service's thread.

    role: ClassVar[Role]  # what its clients name in the handshake
    name: ClassVar[str]  # the name of the thread

    def __init__(
        self,
        job: Job,
        size: int,
        listener: socket.socket,
        room: int | None = None,
    ) -> None:
        """Prepare; `_start` starts the thread."""
        # Clients have numbers below `size`. The rest is that of the `Acceptor`.
        self.address = address_of(listener)  # where it listens, for HVDLITE_RENDEZVOUS
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, job, size, self._selector, self._welcome, room)
        self._peers: list[Peer] = []
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector.register(
            self._woken, selectors.EVENT_READ, lambda: os.eventfd_read(self._woken)
        )
        self._lock = threading.Lock()
        self._stopping = False  # guarded by the lock, for those who write
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def _start(self: _Self) -> _Self:
        self._thread.start()
        return self

    def close(self) -> bool:
        """Stop serving, and end all connections; return False if that was done before."""
        with self._lock:
            if self._stopping:
                return False
            self._stopping = True
            self._wake()
        self._thread.join()
        os.close(self._woken)  # The thread does not close it: it may end before the wake-up.
        return True

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Wake the thread; the caller holds the lock, and has seen that the service goes on."""
        os.eventfd_write(self._woken, 1)

    # What a subclass says.

    def _joined(self, peer: Peer) -> None:
        """Note a new client."""

    def _take(self, peer: Peer, body: bytes) -> None:
        raise NotImplementedError

    def _left(self, peer: Peer) -> None:
        """Note that a connection has ended, while the service goes on."""

    def _sleep_seconds(self, now: float) -> float:
        return _TICK_SECONDS

    def _tick(self, asleep: float) -> None:
        """Do what is due; everything that came before `asleep` has been taken."""

    def _failed(self, error: Exception) -> None:
        raise error

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            self._failed(error)
        finally:
            until = time.monotonic() + _FLUSH_SECONDS
            for peer in self._peers:
                self._selector.unregister(peer.connection)
                peer.close(until - time.monotonic())
            self._acceptor.close()
            self._selector.close()

    def _turn(self) -> None:
        asleep = time.monotonic()
        for key, _ in self._selector.select(self._sleep_seconds(asleep)):
            handle: Callable[[], None] = key.data
            handle()
        self._acceptor.expire()
        self._tick(asleep)
        now = time.monotonic()
        for peer in list(self._peers):
            if peer.ends_by is not None and (not peer.outgoing or now >= peer.ends_by):
                self._end(peer)

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != self.role:
            connection.close()
            return
        peer = Peer(connection, self._job, handshake)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))
        self._joined(peer)

    def _read(self, peer: Peer) -> None:
        if peer.closed:
            return  # An earlier event of this turn ended it.
        peer.flush()
        self._watch(peer)
        bodies = peer.read()
        if bodies is None:
            self._end(peer)
            return
        for body in bodies:
            if peer.closed or peer.ends_by is not None:
                return  # An earlier message ended this connection.
            self._take(peer, body)

    def _send(self, peer: Peer, body: bytes) -> None:
        """Send a message, as fast as the client reads."""
        try:
            peer.send(body)
        finally:
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, lambda: self._read(peer))

    def _close_soon(self, peer: Peer) -> None:
        """Let a client read what was sent to it, then end its connection."""
        peer.ends_by = time.monotonic() + _FLUSH_SECONDS

    def _end(self, peer: Peer) -> None:
        if peer.closed:
            return
        self._selector.unregister(peer.connection)
        peer.close()
        self._peers.remove(peer)
        self._left(peer)


class BacklogError(Exception):
    """The client does not read what is sent to it."""


class Peer:
    """An authenticated connection, with the frames of both directions. Used by one thread."""

    def __init__(self, connection: socket.socket, job: Job, handshake: ServerHandshake) -> None:
        from_client, from_server = session_keys(job, handshake.transcript)
        connection.setblocking(False)
        self.connection = connection  # owned
        self.number = handshake.rank  # the rank, or the number of the worker, at the other end
        self.outgoing = bytearray()  # bytes that the kernel has not taken yet
        self.heard_at = time.monotonic()  # when the last bytes came; monotonic
        self.complaint = ""  # why the connection is useless although it has not ended; "" otherwise
        self.ends_by: float | None = None  # when it ends, if its last message is on its way
        self.closed = False  # whether `close` was called
        self._reader, self._writer = FrameReader(from_client), FrameWriter(from_server)

    def send(self, body: bytes) -> None:
        """Send a message, or queue what the kernel does not take now; `flush` goes on."""
        self.outgoing += self._writer.wrap(body)
        self.flush()
        if len(self.outgoing) > _MAX_BACKLOG_BYTES:
            raise BacklogError(f"left {len(self.outgoing)} bytes of messages unread")

    def flush(self) -> None:
        """Write as much as the kernel takes now; `read` notices if the connection has ended."""
        while self.outgoing:
            try:
                del self.outgoing[: self.connection.send(self.outgoing)]
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                self.outgoing.clear()

    def read(self) -> list[bytes] | None:
        """Return the messages that came; None if the connection has ended or is useless."""
        try:
            data = self.connection.recv(_READ_BYTES)
            bodies = self._reader.feed(data) if data else None
        except BlockingIOError:
            return []
        except OSError:
            return None
        except BootstrapError as error:
            self.complaint = str(error)
            return None
        self.heard_at = time.monotonic()
        return bodies

    def close(self, seconds: float = 0.0) -> None:
        """Close the connection; first give the client this time to take what is on its way."""
        self.closed = True
        if seconds > 0:
            self.connection.settimeout(seconds)
            self.flush()
        self.connection.close()


@dataclass
class _Pending:
    connection: socket.socket
    handshake: ServerHandshake
    deadline: float


class Acceptor:
    """Accepts connections on one listener, and hands over those that belong to this job."""

    # The acceptor owns the listener, and owns each connection until it hands the connection over.
    # Only one thread uses it. `selector` is borrowed; its owner calls the key's data for each
    # event, and `expire` regularly. `room` bounds the handshakes at once; by default `size` does.
    # It is not worth a message when a peer hangs up or belongs to another epoch: in elastic jobs
    # that is usual, and the peer itself says it.

    def __init__(
        self,
        listener: socket.socket,
        job: Job,
        size: int,
        selector: selectors.BaseSelector,
        welcome: Callable[[socket.socket, ServerHandshake], None],
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
                raise ConnectionAbortedError  # It hung up before it had said who it is.
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
        if not isinstance(why, (OSError, OtherEpochError)):
            self._tell(f"refused a connection: {why}")
        self._drop(pending)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]
