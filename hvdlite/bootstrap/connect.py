"""From a launcher's environment to everything that the engine needs.

The ranks exchange addresses through the store, then connect to each other directly: rank i dials
every lower rank and accepts every higher one. Within a host a pair shares one Unix socket, over
which both pass their memory and their bell; between hosts it has two TCP connections, for control
and for data. All names are abstract or ports chosen by the kernel: nothing stays behind, and
nothing listens once the ranks are connected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlite.bootstrap.acceptor import Acceptor
from hvdlite.bootstrap.address import (
    address_of,
    dial,
    fresh_unix_address,
    interface_address,
    listen,
)
from hvdlite.bootstrap.clock import SAME_CLOCK, ClockOffset, answer_readings, measure_offset
from hvdlite.bootstrap.environment import WorkerEnvironment
from hvdlite.bootstrap.handshake import Job, Role, ServerHandshake
from hvdlite.bootstrap.store import Store, StoreClient, client_handshake
from hvdlite.bootstrap.topology import Place, Said, place_ranks
from hvdlite.errors import BootstrapError

_LOOPBACK = "127.0.0.1"
_TICK_SECONDS = 0.1
_STARTS_PER_EPOCH = 1 << 16

_starts = 0


@dataclass(frozen=True)
class Connection:
    """The arguments of `_core.Engine`, and this rank's place.

    Attributes:
        links: per peer (rank, control, data, segment, bell) descriptors, -1 where there is none;
            whoever takes them owns them.
        clock: of this host against rank 0's.
    """

    rank: int = 0
    size: int = 1
    host_of: Sequence[int] = (0,)
    links: Sequence[tuple[int, int, int, int, int]] = ()
    segment_fd: int = -1
    bell_fd: int = -1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    clock: ClockOffset = SAME_CLOCK

    def close(self) -> None:
        """Close the descriptors: nobody takes them."""
        descriptors = [
            self.segment_fd,
            self.bell_fd,
            *(fd for link in self.links for fd in link[1:]),
        ]
        for fd in descriptors:
            if fd >= 0:
                os.close(fd)


@dataclass
class _Link:
    control: socket.socket | None = None
    data: socket.socket | None = None
    segment: int = -1
    bell: int = -1

    def close(self) -> None:
        for connection in (self.control, self.data):
            if connection is not None:
                connection.close()
        for fd in (self.segment, self.bell):
            if fd >= 0:
                os.close(fd)

    def release(self, rank: int) -> tuple[int, int, int, int, int]:
        descriptors = []
        for connection in (self.control, self.data):
            if connection is None:
                descriptors.append(-1)
                continue
            connection.setblocking(False)
            descriptors.append(connection.detach())
        return (rank, descriptors[0], descriptors[1], self.segment, self.bell)


def connect(
    worker: WorkerEnvironment,
    create_segment: Callable[[int], int],
    agreed: Mapping[str, str] | None = None,
) -> Connection:
    """Connect this rank to all others.

    Args:
        worker: this rank's place, as the launcher said.
        create_segment: makes the memory that this rank shares with its host, given the number of
            ranks there; returns a descriptor.
        agreed: settings that every rank must have alike, by variable.

    Raises:
        BootstrapError: some rank did not arrive or was refused; the message says which.
    """
    if worker.size == 1:
        return Connection()
    # All ranks call init() equally often, so a leftover of an earlier start is of another epoch.
    global _starts
    epoch = worker.epoch * _STARTS_PER_EPOCH + _starts % _STARTS_PER_EPOCH
    _starts += 1
    job = Job(worker.token, worker.job_id, worker.epoch)
    assert worker.rendezvous is not None
    with contextlib.ExitStack() as stack:
        if worker.serves_store:
            stack.enter_context(_serve_store(worker, worker.rendezvous))
        client = StoreClient(worker.rendezvous, job, worker.rank, worker.start_timeout)
        stack.enter_context(client)
        mesh = _Mesh(worker, Job(worker.token, worker.job_id, epoch), client, create_segment)
        return mesh.connect(agreed or {})


def _serve_store(worker: WorkerEnvironment, address: str) -> Store:
    """Serve the store in rank 0, where the launcher has none."""
    remedy = "set HVDLITE_RENDEZVOUS for all ranks to an address and a free port of rank 0's host"
    try:
        store = Store.start(worker.size, worker.token, worker.job_id, worker.epoch, address)
    except OSError as error:
        reason = error.strerror or error
        raise BootstrapError(f"rank 0 cannot listen at {address}: {reason}; {remedy}") from error
    # As where /etc/hosts maps a host's own name to 127.0.1.1.
    if store.address.startswith("127.") and worker.local_size not in (None, worker.size):
        store.close()
        raise BootstrapError(
            f"rank 0 would serve at {address}, which no other host can reach; {remedy}"
        )
    return store


def host_identity(override: str | None) -> str:
    """Name this host: ranks with the same name share memory.

    Network namespaces and users are told apart, as is the boot; a name alone is never enough.
    """
    if override is not None:
        return "override:" + override
    parts = [socket.gethostname(), str(os.getuid()), str(Path("/proc/self/ns/net").stat().st_ino)]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _check_agreed(settings: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that would cut the same tensors differently."""
    for rank, own in enumerate(settings):
        for name, value in own.items():
            first = settings[0].get(name)
            if value != first:
                raise BootstrapError(
                    f"rank 0 has {name}={first}, rank {rank} has {name}={value}; every rank needs "
                    "the same value"
                )


class _Mesh:
    """One rank's half of the full mesh, while it is being built."""

    def __init__(
        self,
        worker: WorkerEnvironment,
        job: Job,
        client: StoreClient,
        create_segment: Callable[[int], int],
    ) -> None:
        self._worker = worker
        self._job = job
        self._client = client
        self._create_segment = create_segment
        self._deadline = time.monotonic() + worker.start_timeout
        self._links = {rank: _Link() for rank in range(worker.size) if rank != worker.rank}
        self._segment = self._bell = -1
        self._failure: Exception | None = None

    def connect(self, agreed: Mapping[str, str]) -> Connection:
        listeners = [listen(fresh_unix_address()), listen(f"{self._own_host()}:0")]
        try:
            peers = self._exchange_addresses(listeners, agreed)
            _check_agreed([peer["agreed"] for peer in peers])
            place = place_ranks(
                [peer["host"] for peer in peers],
                self._worker.rank,
                [Said(*peer["said"]) for peer in peers],
            )
            self._segment = self._create_segment(place.local_size)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._run(listeners, peers, place)
            own_clock = json.dumps(self._compare_clocks(place)).encode()
            # Nobody starts before everybody is connected: then every socket has its owner.
            clocks = self._client.exchange(f"connected/{self._job.epoch}", own_clock)
        except BaseException:
            self._close()
            raise
        finally:
            for listener in listeners:
                listener.close()
        first = place.host_of.index(place.host_of[self._worker.rank])
        return self._result(place, ClockOffset(*json.loads(clocks[first])))

    def _compare_clocks(self, place: Place) -> ClockOffset:
        """Compare clocks over TCP: the first rank of every other host with rank 0."""
        rank, host_of = self._worker.rank, place.host_of
        firsts = [host_of.index(host) for host in range(1, max(host_of) + 1)]
        for peer in firsts if rank == 0 else [0] if rank in firsts else []:
            connection = self._links[peer].control
            assert connection is not None
            connection.settimeout(max(0.1, self._deadline - time.monotonic()))
            try:
                if rank != 0:
                    return measure_offset(connection)
                answer_readings(connection)
            except OSError as error:
                raise BootstrapError(
                    f"rank {rank} could not compare its clock with rank {peer}'s: {error}"
                ) from error
        return SAME_CLOCK

    def _own_host(self) -> str:
        """The address that other hosts reach this one at: by default, of the route to the store."""
        if self._worker.interfaces:
            return interface_address(self._worker.interfaces)
        return self._client.local_host or _LOOPBACK

    def _exchange_addresses(
        self, listeners: list[socket.socket], agreed: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        worker = self._worker
        # A rank that plays another host knows better than its launcher where it is.
        said = (worker.local_rank, worker.local_size, worker.node)
        own = {
            "host": host_identity(worker.host_id),
            "said": said if worker.host_id is None else (),
            "unix": address_of(listeners[0]),
            "tcp": address_of(listeners[1]),
            "agreed": dict(agreed),
        }
        blobs = self._client.exchange(f"addresses/{self._job.epoch}", json.dumps(own).encode())
        return [json.loads(blob) for blob in blobs]

    def _run(
        self, listeners: list[socket.socket], peers: list[dict[str, Any]], place: Place
    ) -> None:
        """Accept in a thread of its own while this one dials."""
        accepting = threading.Thread(
            target=self._accept_all, args=(listeners, place), name="hvdlite-accept", daemon=True
        )
        accepting.start()
        try:
            for rank in range(self._worker.rank):
                self._dial(rank, peers[rank], place)
        except Exception as error:
            self._failure = self._failure or error
        accepting.join()
        if self._failure is not None:
            raise self._failure

    def _dial(self, rank: int, peer: dict[str, Any], place: Place) -> None:
        local = place.host_of[rank] == place.host_of[self._worker.rank]
        roles = [Role.CONTROL] if local else [Role.CONTROL, Role.DATA]
        for role in roles:
            try:
                left = max(0.1, self._deadline - time.monotonic())
                connection = dial(peer["unix"] if local else peer["tcp"], left)
            except OSError as error:
                raise BootstrapError(
                    f"rank {self._worker.rank} cannot reach rank {rank}: {error}"
                ) from error
            try:
                client_handshake(connection, self._job, self._worker.rank, role)
            except BootstrapError as error:
                connection.close()
                raise BootstrapError(f"rank {rank}: {error}") from error
            self._keep(rank, role, connection)

    def _accept_all(self, listeners: list[socket.socket], place: Place) -> None:
        """Accept until every higher rank is connected, a failure, or the deadline."""
        with selectors.DefaultSelector() as selector:
            acceptors = [
                Acceptor(listener, self._job, self._worker.size, selector, self._welcome)
                for listener in listeners
            ]
            try:
                while self._failure is None and (missing := self._missing(place)):
                    if time.monotonic() > self._deadline:
                        raise BootstrapError(
                            f"rank {missing[0]} did not connect to rank {self._worker.rank} in time"
                        )
                    for key, _ in selector.select(_TICK_SECONDS):
                        handle: Callable[[], None] = key.data
                        handle()
                    for acceptor in acceptors:
                        acceptor.expire()
            except Exception as error:
                self._failure = self._failure or error
            for acceptor in acceptors:
                acceptor.close()

    def _missing(self, place: Place) -> list[int]:
        missing = []
        for rank in range(self._worker.rank + 1, self._worker.size):
            link = self._links[rank]
            local = place.host_of[rank] == place.host_of[self._worker.rank]
            if link.control is None or (link.data is None and not local):
                missing.append(rank)
        return missing

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        link = self._links.get(handshake.rank)
        taken = (
            link is None
            or (link.control if handshake.role == Role.CONTROL else link.data) is not None
        )
        if taken or handshake.rank < self._worker.rank or handshake.role == Role.STORE:
            connection.close()
            return
        self._keep(handshake.rank, handshake.role, connection)

    def _keep(self, rank: int, role: Role, connection: socket.socket) -> None:
        """Take over an authenticated connection; within a host, swap memory and bells over it."""
        link = self._links[rank]
        if role == Role.DATA:
            link.data = connection
            return
        if connection.family == socket.AF_UNIX:
            connection.settimeout(max(0.1, self._deadline - time.monotonic()))
            try:
                socket.send_fds(connection, [b"f"], [self._segment, self._bell])
                data, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
            except OSError as error:
                raise BootstrapError(f"rank {rank} did not pass its memory: {error}") from error
            for fd in descriptors:
                os.set_inheritable(fd, False)
            if data != b"f" or len(descriptors) != 2:
                raise BootstrapError(f"rank {rank} left before it passed its memory")
            link.segment, link.bell = descriptors
        link.control = connection

    def _close(self) -> None:
        for link in self._links.values():
            link.close()
        for fd in (self._segment, self._bell):
            if fd >= 0:
                os.close(fd)

    def _result(self, place: Place, clock: ClockOffset) -> Connection:
        return Connection(
            rank=self._worker.rank,
            size=self._worker.size,
            host_of=place.host_of,
            links=tuple(link.release(rank) for rank, link in self._links.items()),
            segment_fd=self._segment,
            bell_fd=self._bell,
            local_rank=place.local_rank,
            local_size=place.local_size,
            cross_rank=place.cross_rank,
            cross_size=place.cross_size,
            clock=clock,
        )
