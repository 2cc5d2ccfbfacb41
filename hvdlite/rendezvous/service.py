"""A service by which the processes of a job meet: its connections, its clock and its thread.

Clients prove by the handshake that they belong to the job. Then both sides send JSON objects with a
"kind", in the frames of `frames`. What these mean is up to the subclass: `store.Store` for ranks
whose number is fixed, `hvdlite.launch.elastic.registrar.Registrar` for workers that come and go.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

from hvdlite.rendezvous.acceptor import Acceptor
from hvdlite.rendezvous.address import address_of
from hvdlite.rendezvous.handshake import Job, Role, ServerHandshake
from hvdlite.rendezvous.peer import Peer

_TICK_SECONDS = 0.25  # the longest sleep, as the acceptor drops slow strangers in between
_FLUSH_SECONDS = 2.0  # A connection lasts so long after its last message.

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
        peers_return: bool = False,
    ) -> None:
        """Prepare; `_start` starts the thread."""
        # Clients have numbers below `size`. The rest is that of the `Acceptor`.
        self.address = address_of(listener)  # where it listens, for HVDLITE_RENDEZVOUS
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            listener, job, size, self._selector, self._welcome, peers_return, room
        )
        self._peers: list[Peer] = []
        self._closing: list[tuple[Peer, float]] = []
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)
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
        # The thread does not close these: it may end before the wake-up above has happened.
        self._wake_reader.close()
        self._wake_writer.close()
        return True

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"x")
        except BlockingIOError:
            pass  # So many wake-ups are on their way that one more changes nothing.

    # What a subclass says.

    def _joined(self, peer: Peer) -> None:
        """Note a new client."""

    def _take(self, peer: Peer, body: bytes) -> None:
        """Do what a client asks for."""
        raise NotImplementedError

    def _left(self, peer: Peer) -> None:
        """Note that a connection has ended, while the service goes on."""

    def _sleep_seconds(self, now: float) -> float:
        """Return how long the thread may sleep."""
        return _TICK_SECONDS

    def _tick(self, asleep: float) -> None:
        """Do what is due; everything that came before `asleep` has been taken."""

    def _failed(self, error: Exception) -> None:
        """Tell that this service has failed."""
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
        for peer, deadline in list(self._closing):
            if not peer.outgoing or now >= deadline:
                self._end(peer)

    def _drain_wakes(self) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:
            pass  # It was drained already.

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != self.role:
            connection.close()
            return
        peer = Peer(connection, self._job, handshake)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))
        self._joined(peer)

    def _read(self, peer: Peer) -> None:
        """Read and write what is possible now."""
        if peer.closed:
            return  # An earlier event of this turn ended it.
        peer.flush()
        self._watch(peer)
        bodies = peer.read()
        if bodies is None:
            self._end(peer)
            return
        for body in bodies:
            if peer.closed or any(one is peer for one, _ in self._closing):
                return  # An earlier message ended this connection.
            self._take(peer, body)

    def _send(self, peer: Peer, body: bytes) -> None:
        """Send a message, as fast as the client reads."""
        # Raises BacklogError if the client does not read.
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
        self._closing.append((peer, time.monotonic() + _FLUSH_SECONDS))

    def _end(self, peer: Peer) -> None:
        """End a connection now."""
        if peer.closed:
            return
        self._selector.unregister(peer.connection)
        peer.close()
        self._peers.remove(peer)
        self._closing = [entry for entry in self._closing if entry[0] is not peer]
        self._left(peer)
