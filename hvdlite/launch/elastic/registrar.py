"""The registrar of an elastic job: it serves membership threads, and decides who is a member.

The launcher runs it. All decisions are those of `membership.Membership`. Other threads only leave
calls for the thread of this service, and take the events that it left.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable

from hvdlite.launch.elastic.membership import Membership
from hvdlite.launch.elastic.messages import (
    Action,
    Event,
    Evict,
    Failed,
    Limits,
    Refused,
    Send,
    Warn,
)
from hvdlite.rendezvous.address import fresh_unix_address, listen
from hvdlite.rendezvous.handshake import Job, Role
from hvdlite.rendezvous.service import BacklogError, Peer, Service

_MOST_WORKERS = 2**31  # worker numbers are below it

_Call = Callable[[float], list[Action]]


class Registrar(Service):
    role = Role.MEMBERSHIP
    name = "hvdlite-registrar"

    def __init__(self, job: Job, limits: Limits, listener: socket.socket) -> None:
        super().__init__(job, _MOST_WORKERS, listener, 2 * (limits.max_np or limits.np))
        # Readable while `take()` has events; borrowed by the caller until `close()`.
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heartbeat = limits.heartbeat
        self._silence = limits.silence
        self._membership = Membership(limits)
        self._workers: dict[int, Peer] = {}  # The membership knows these, by number.
        self._alive_at = 0.0  # when the next heartbeat is due
        self._calls: deque[tuple[_Call, float]] = deque()  # guarded by the lock
        self._events: list[Event] = []  # guarded by the lock

    @classmethod
    def start(cls, job: Job, limits: Limits, address: str | None = None) -> Registrar:
        """Listen, by default at a fresh abstract Unix socket, and serve until `close` is called.

        The job has epoch 0. An OSError says why this address cannot be listened at.
        """
        return cls(job, limits, listen(address or fresh_unix_address()))._start()

    # Any thread calls these; the first four are those of `Membership`.

    def expect(self, worker: int, host: str, joiner: bool) -> None:
        self._post(lambda now: self._membership.expect(worker, host, joiner, now))

    def ended(self, worker: int, why: str, clean: bool) -> None:
        self._post(lambda now: self._membership.ended(worker, why, clean, now))

    def drain(self, worker: int, why: str) -> None:
        self._post(lambda now: self._membership.drain(worker, why, now))

    def stops(self) -> None:
        self._post(self._membership.stops)

    def take(self) -> list[Event]:
        with self._lock:
            events, self._events = self._events, []
            with contextlib.suppress(BlockingIOError):  # There was no event.
                os.eventfd_read(self.fd)
            return events

    def close(self) -> bool:
        first = super().close()
        if first:
            os.close(self.fd)
        return first

    def _post(self, call: _Call) -> None:
        with self._lock:
            if self._stopping:
                return
            self._calls.append((call, time.monotonic()))
            self._wake()

    # The thread.

    def _failed(self, error: Exception) -> None:
        self._emit(Failed(f"the registrar of the job failed: {error!r}"))

    def _sleep_seconds(self, now: float) -> float:
        times = [now + super()._sleep_seconds(now), self._alive_at, self._membership.wake_at()]
        return max(0.0, min(when for when in times if when is not None) - now)

    def _tick(self, asleep: float) -> None:
        self._obey()
        for peer in list(self._workers.values()):
            # Whatever came before the sleep has been read by now, however late this thread is.
            if asleep - peer.heard_at >= self._silence:
                why = f"sent nothing for {self._silence:g} s"
                self._do(self._membership.evict(peer.number, why, time.monotonic()))
                self._dismiss(peer.number)
        now = time.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + self._heartbeat / 4
            for peer in list(self._workers.values()):
                if not peer.outgoing:  # Whatever is on its way says as much.
                    self._do([Send(peer.number, {"kind": "alive"})])
        self._do(self._membership.tick(now))

    def _obey(self) -> None:
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
                peer = self._workers.get(action.worker)
                if peer is not None:
                    body = json.dumps(action.message, separators=(",", ":")).encode()
                    try:
                        self._send(peer, body)
                    except BacklogError as error:
                        todo += self._membership.evict(peer.number, str(error), time.monotonic())
            else:
                if isinstance(action, (Evict, Refused)):
                    self._dismiss(action.worker)
                self._emit(action)

    def _emit(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            os.eventfd_write(self.fd, 1)

    def _joined(self, peer: Peer) -> None:
        self._obey()  # The process may have been faster than the call that announced it.
        worker = peer.number
        if self._membership.knows(worker) and worker not in self._workers:
            self._workers[worker] = peer
            if peer.connection.family != socket.AF_UNIX:
                # The kernel of a living host confirms what it gets, whatever the worker does.
                lost = int(1000 * self._heartbeat)
                peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost)
            return
        known = "has a connection already" if worker in self._workers else "is not of this job"
        refusal = {"kind": "refused", "reason": f"worker {worker} {known}, or not any more"}
        self._send(peer, json.dumps(refusal).encode())
        self._close_soon(peer)

    def _take(self, peer: Peer, body: bytes) -> None:
        message = json.loads(body)
        if message["kind"] != "alive":
            self._do(self._membership.received(peer.number, message, time.monotonic()))

    def _left(self, peer: Peer) -> None:
        if self._workers.get(peer.number) is not peer:
            return
        del self._workers[peer.number]
        if peer.complaint:
            self._emit(Warn(f"worker {peer.number}: {peer.complaint}"))
        self._do(self._membership.connection_lost(peer.number, time.monotonic()))

    def _dismiss(self, worker: int) -> None:
        peer = self._workers.pop(worker, None)
        if peer is not None:
            self._close_soon(peer)
