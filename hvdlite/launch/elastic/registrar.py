"""The registrar of an elastic job: it serves membership threads, and decides who is a member.

The launcher runs it. All decisions are those of `membership.Membership`; this module has its
connections, its clock and its thread. Other threads only leave calls for that thread, and take the
events that it left.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from hvdlite.launch.elastic.actions import (
    Action,
    Close,
    Entered,
    EpochFormed,
    Event,
    Evict,
    Failed,
    Leaving,
    Limits,
    Raised,
    Refused,
    Send,
    Warn,
    Went,
)
from hvdlite.launch.elastic.membership import Membership
from hvdlite.launch.elastic.messages import MalformedError, parse
from hvdlite.launch.elastic.peer import BacklogError, Peer, TooLongError
from hvdlite.rendezvous.acceptor import Acceptor
from hvdlite.rendezvous.address import address_of, fresh_unix_address, listen
from hvdlite.rendezvous.deadline import is_never
from hvdlite.rendezvous.handshake import Job, Role, ServerHandshake

__all__ = [
    "Entered",
    "EpochFormed",
    "Event",
    "Evict",
    "Failed",
    "Leaving",
    "Limits",
    "Raised",
    "Refused",
    "Registrar",
    "Warn",
    "Went",
]

_TICK_SECONDS = 0.25  # the longest sleep, as the acceptor drops slow strangers in between
_MOST_WORKERS = 2**31  # worker numbers are below it
_ROOM = 1024  # handshakes at once
_FLUSH_SECONDS = 2.0  # A connection lasts so long after its last message.

_Call = Callable[[float], list[Action]]


class Registrar:
    """Serves one elastic job from a daemon thread, which `Registrar.start` starts."""

    def __init__(self, job: Job, limits: Limits, listener: socket.socket) -> None:
        self.address = address_of(listener)  # where it listens, for HVDLITE_RENDEZVOUS
        # Readable while `take()` has events; borrowed by the caller until `close()`.
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._job = job
        self._heartbeat = None if is_never(limits.heartbeat) else limits.heartbeat
        self._silence = limits.silence
        self._membership = Membership(limits)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            listener, job, _MOST_WORKERS, self._selector, self._welcome, room=_ROOM
        )
        self._peers: dict[int, Peer] = {}
        self._closing: list[tuple[Peer, float]] = []
        self._alive_at = 0.0  # when the next heartbeat is due
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)
        self._lock = threading.Lock()
        self._calls: deque[tuple[_Call, float]] = deque()  # guarded by the lock
        self._events: list[Event] = []  # guarded by the lock
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-registrar", daemon=True)

    @classmethod
    def start(cls, job: Job, limits: Limits, address: str | None = None) -> Registrar:
        """Listen, and serve until `close` is called."""
        # `job` has epoch 0.
        # `address` says where to listen; by default a fresh abstract Unix socket.
        # Raises OSError if the kernel refuses to listen at this address.
        registrar = cls(job, limits, listen(address or fresh_unix_address()))
        registrar._thread.start()
        return registrar

    # Any thread calls these.

    def expect(self, worker: int, host: str, joiner: bool) -> None:
        """Announce a worker, before its process is started."""
        self._post(lambda now: self._membership.expect(worker, host, joiner, now))

    def ended(self, worker: int, why: str, clean: bool) -> None:
        """Report that the process of a worker has ended; `clean`: with 0, or it was drained."""
        self._post(lambda now: self._membership.ended(worker, why, clean, now))

    def drain(self, worker: int, why: str) -> None:
        """Ask a worker to leave at the next boundary."""
        self._post(lambda now: self._membership.drain(worker, why, now))

    def stops(self) -> None:
        """Say that all workers are asked to stop, before they are."""
        self._post(self._membership.stops)

    def evict(self, worker: int, why: str) -> None:
        """Take a worker out of the job now."""
        self._post(lambda now: self._membership.evict(worker, why, now))

    def take(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        with self._lock:
            events, self._events = self._events, []
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass  # There was no event.
            return events

    def close(self) -> None:
        """Stop serving; workers that are connected lose their connection."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()
        os.close(self.fd)

    def _post(self, call: _Call) -> None:
        with self._lock:
            if self._stopping:
                return
            self._calls.append((call, time.monotonic()))
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"x")
        except BlockingIOError:
            pass  # So many wake-ups are on their way that one more changes nothing.

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            self._emit(Failed(f"the registrar of the job failed: {error!r}"))
        for peer in [*self._peers.values(), *(peer for peer, _ in self._closing)]:
            self._selector.unregister(peer.connection)
            peer.close()
        self._acceptor.close()
        self._selector.close()

    def _turn(self) -> None:
        asleep = time.monotonic()
        for key, _ in self._selector.select(self._sleep_seconds(asleep)):
            handle: Callable[[], None] = key.data
            handle()
        self._obey()
        self._acceptor.expire()
        # Whatever came before the sleep has been read by now, however late this thread is.
        self._find_silent(asleep)
        now = time.monotonic()
        self._beat(now)
        for peer, deadline in list(self._closing):
            if not peer.outgoing or now >= deadline:
                self._end(peer)
        self._do(self._membership.tick(now))

    def _sleep_seconds(self, now: float) -> float:
        times = [now + _TICK_SECONDS]
        if self._heartbeat is not None:
            times.append(self._alive_at)
        wake_at = self._membership.wake_at()
        if wake_at is not None:
            times.append(wake_at)
        return max(0.0, min(times) - now)

    def _drain_wakes(self) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:
            pass  # It was drained already.

    def _obey(self) -> None:
        """Do what other threads asked for, in their order."""
        while True:
            with self._lock:
                if not self._calls:
                    return
                call, now = self._calls.popleft()
            self._do(call(now))

    def _do(self, actions: list[Action]) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            if isinstance(action, Send):
                peer = self._peers.get(action.worker)
                if peer is not None:
                    todo += self._send(peer, action)
            elif isinstance(action, Close):
                self._close_soon(action.worker)
            else:
                self._emit(action)

    def _send(self, peer: Peer, action: Send) -> list[Action]:
        try:
            peer.send(action.message)
            self._flush(peer)
        except BacklogError as error:
            return self._membership.evict(peer.worker, str(error), time.monotonic())
        except TooLongError as error:
            return self._membership.give_up(str(error), time.monotonic())
        return []

    def _flush(self, peer: Peer) -> None:
        """Write what the kernel takes now; `_read` sees it if the connection has ended."""
        peer.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, lambda: self._read(peer))

    def _emit(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            os.eventfd_write(self.fd, 1)

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != Role.MEMBERSHIP:
            connection.close()
            return
        self._obey()  # The process may have been faster than the call that announced it.
        worker = handshake.rank
        connection.setblocking(False)
        peer = Peer(connection, worker, self._job, handshake)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))
        if self._membership.knows(worker) and worker not in self._peers:
            self._peers[worker] = peer
            return
        known = "has a connection already" if worker in self._peers else "is not of this job"
        peer.send({"kind": "refused", "reason": f"worker {worker} {known}, or not any more"})
        self._flush(peer)
        self._closing.append((peer, time.monotonic() + _FLUSH_SECONDS))

    def _read(self, peer: Peer) -> None:
        """Read and write what is possible now."""
        if peer.closed:
            return  # An earlier event of this turn ended it.
        self._flush(peer)
        bodies = peer.read()
        if bodies is None:
            self._lost(peer)
            return
        for body in bodies:
            if self._peers.get(peer.worker) is not peer:
                return  # An earlier message ended this connection.
            self._take(peer, body)

    def _take(self, peer: Peer, body: bytes) -> None:
        now = time.monotonic()
        try:
            message = parse(body)
        except MalformedError as error:
            text = f"worker {peer.worker} sent a malformed message: {error}"
            self._emit(Warn(text))
            self._do(self._membership.evict(peer.worker, f"sent a malformed message: {error}", now))
            return
        if message["kind"] != "alive":
            self._do(self._membership.received(peer.worker, message, now))

    def _lost(self, peer: Peer) -> None:
        current = self._peers.get(peer.worker) is peer
        self._end(peer)
        if not current:
            return
        if peer.complaint:
            self._emit(Warn(f"worker {peer.worker}: {peer.complaint}"))
        self._do(self._membership.connection_lost(peer.worker, time.monotonic()))

    def _close_soon(self, worker: int) -> None:
        """Let a worker read what was sent to it, then end its connection."""
        peer = self._peers.pop(worker, None)
        if peer is not None:
            self._closing.append((peer, time.monotonic() + _FLUSH_SECONDS))

    def _end(self, peer: Peer) -> None:
        if peer.closed:
            return
        self._selector.unregister(peer.connection)
        peer.close()
        self._closing = [entry for entry in self._closing if entry[0] is not peer]
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]

    def _find_silent(self, now: float) -> None:
        if self._heartbeat is None:
            return
        for peer in list(self._peers.values()):
            if now - peer.heard_at >= self._silence:
                self._do(self._membership.heartbeat_lost(peer.worker, time.monotonic()))
                self._close_soon(peer.worker)

    def _beat(self, now: float) -> None:
        if self._heartbeat is None or now < self._alive_at:
            return
        self._alive_at = now + self._heartbeat / 4
        for peer in list(self._peers.values()):
            if not peer.outgoing:  # Whatever is on its way says as much.
                self._do([Send(peer.worker, {"kind": "alive"})])
