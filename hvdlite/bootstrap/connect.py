"""Connect this rank to all others, and return everything that the engine needs.

The ranks exchange addresses through the store. Then they connect to each other directly: rank i
dials every lower rank and accepts every higher one. Two ranks of one host share one Unix socket,
over which each passes to the other its shared memory segment and its bell (an eventfd that wakes
it). Two ranks of different hosts have two TCP connections, one for control and one for data.

Addresses are abstract Unix sockets, or ports that the kernel chooses. So no files stay behind, and
no process listens once the ranks are connected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlite.bootstrap.acceptor import Acceptor
from hvdlite.bootstrap.address import (
    address_of,
    fresh_unix_address,
    interface_address,
    is_loopback,
    listen,
)
from hvdlite.bootstrap.clock import SAME_CLOCK, ClockOffset, answer_readings, measure_offset
from hvdlite.bootstrap.deadline import Deadline, GivenUpError
from hvdlite.bootstrap.environment import WorkerEnvironment
from hvdlite.bootstrap.handshake import Job, Role, ServerHandshake
from hvdlite.bootstrap.introduction import introduce
from hvdlite.bootstrap.store import Store, StoreClient
from hvdlite.bootstrap.topology import LauncherNumbers, Topology, find_topology
from hvdlite.errors import BootstrapError

_LOOPBACK = "127.0.0.1"
_EPOCH_BYTES = 4


@dataclass(frozen=True)
class Connection:
    """The arguments of `_core.Engine`, and this rank's local and cross ranks.

    The default is a world of one. The caller owns all descriptors.

    Attributes:
        host_of: by rank, the index of its host.
        links: for each peer, its rank and the descriptors of its control and data connections,
            segment and bell; -1 stands for a descriptor that does not exist.
        segment_fd: this rank's own shared memory segment.
        bell_fd: this rank's own bell.
        clock: the offset of this host's clock to rank 0's.
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
        """Close the descriptors, when no engine takes them."""
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
    """The connections to one peer, while they are made.

    A control connection is in `passing` until the peer has passed its memory over it, and in
    `control` from then on.
    """

    control: socket.socket | None = None
    data: socket.socket | None = None
    passing: socket.socket | None = None
    segment: int = -1
    bell: int = -1

    def close(self) -> None:
        for connection in (self.control, self.data, self.passing):
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
    deadline: Deadline | None = None,
) -> Connection:
    """Connect this rank to all others.

    Args:
        worker: the launcher's description of this rank.
        create_segment: makes the memory that this rank shares with the ranks of its host; takes
            their number and returns a descriptor.
        agreed: by variable, the settings that must be equal on every rank.
        deadline: limits the whole start, and another thread may give it up; by default it follows
            from `worker.start_timeout`.

    Raises:
        BootstrapError: a rank did not arrive, was refused, or has other settings; the message
            names the rank.
        GivenUpError: the deadline was given up.
    """
    if worker.size == 1:
        return Connection()
    deadline = deadline or Deadline(worker.start_timeout)
    job = Job(worker.token, worker.job_id, worker.epoch)
    assert worker.rendezvous is not None
    with contextlib.ExitStack() as stack:
        if worker.serves_store:
            stack.enter_context(_serve_store(worker, job, worker.rendezvous))
        client = StoreClient(worker.rendezvous, job, worker.rank, deadline)
        stack.enter_context(client)
        return _Mesh(worker, client, create_segment, deadline).connect(agreed or {})


def _serve_store(worker: WorkerEnvironment, job: Job, address: str) -> Store:
    """Serve the store in rank 0, for launchers that do not serve one."""
    remedy = "set HVDLITE_RENDEZVOUS for all ranks to an address and a free port of rank 0's host"
    try:
        store = Store.start(worker.size, job, address)
    except OSError as error:
        reason = error.strerror or error
        raise BootstrapError(f"rank 0 cannot listen at {address}: {reason}; {remedy}") from error
    # The usual reason is an /etc/hosts that maps the host's own name to 127.0.1.1.
    if is_loopback(store.address) and worker.local_size not in (None, worker.size):
        store.close()
        raise BootstrapError(
            f"rank 0 would serve at {address}, which no other host can reach; {remedy}"
        )
    return store


def host_identity(override: str | None) -> str:
    """Return a text that identifies this host; ranks with equal texts share memory.

    A host name alone is not enough. The text also depends on the network namespace (containers),
    the user, and the boot. `override` stands for all of these, so that tests can let one machine
    act as several hosts.
    """
    if override is not None:
        return "override:" + override
    parts = [socket.gethostname(), str(os.getuid()), str(Path("/proc/self/ns/net").stat().st_ino)]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _check_agreed(settings: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have equal settings; else they would cut the same tensors differently.

    Raises:
        BootstrapError: two ranks differ.
    """
    for rank, own in enumerate(settings):
        for name, value in own.items():
            first = settings[0].get(name)
            if value != first:
                raise BootstrapError(
                    f"rank 0 has {name}={first}, rank {rank} has {name}={value}; every rank needs "
                    "the same value"
                )


class _Mesh:
    """This rank's connections of the full mesh, while they are made.

    While `_run` runs, two threads use this object: the caller's dials the lower ranks, and another
    one accepts the higher ranks. They touch the links of different ranks.
    """

    def __init__(
        self,
        worker: WorkerEnvironment,
        client: StoreClient,
        create_segment: Callable[[int], int],
        deadline: Deadline,
    ) -> None:
        self._worker = worker
        self._job = Job(worker.token, worker.job_id, worker.epoch)
        self._client = client
        self._create_segment = create_segment
        self._deadline = deadline
        self._links = {rank: _Link() for rank in range(worker.size) if rank != worker.rank}
        self._selector = selectors.DefaultSelector()
        self._segment = self._bell = -1
        self._failure: BaseException | None = None

    def connect(self, agreed: Mapping[str, str]) -> Connection:
        listeners = [listen(fresh_unix_address()), listen(f"{self._own_host()}:0")]
        try:
            peers = self._exchange_addresses(listeners, agreed)
            _check_agreed([peer["agreed"] for peer in peers])
            topology = find_topology(
                [peer["host"] for peer in peers],
                self._worker.rank,
                [LauncherNumbers(*peer["said"]) for peer in peers],
            )
            self._segment = self._create_segment(topology.local_size)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._run(listeners, peers, topology)
            own_clock = json.dumps(self._compare_clocks(topology)).encode()
            # No rank's engine starts before all ranks are connected, so that every rank has taken
            # over its sockets before a peer writes to them.
            clocks = self._client.exchange(f"connected/{self._job.epoch}", own_clock)
        except BaseException:
            self._close()
            raise
        finally:
            self._selector.close()
            for listener in listeners:
                listener.close()
        first = topology.host_of.index(topology.host_of[self._worker.rank])
        return self._result(topology, ClockOffset(*json.loads(clocks[first])))

    def _compare_clocks(self, topology: Topology) -> ClockOffset:
        """Compare clocks over TCP: the first rank of every other host does so with rank 0."""
        rank, host_of = self._worker.rank, topology.host_of
        firsts = [host_of.index(host) for host in range(1, max(host_of) + 1)]
        for peer in firsts if rank == 0 else [0] if rank in firsts else []:
            connection = self._links[peer].control
            assert connection is not None
            try:
                if rank != 0:
                    return measure_offset(connection, self._deadline)
                answer_readings(connection, self._deadline)
            except OSError as error:
                raise BootstrapError(
                    f"rank {rank} could not compare its clock with rank {peer}'s: {error}"
                ) from error
        return SAME_CLOCK

    def _own_host(self) -> str:
        """Return the address at which other hosts reach this one.

        By default it is the address from which this host reaches the store.
        """
        if self._worker.interfaces:
            return interface_address(self._worker.interfaces)
        return self._client.local_host or _LOOPBACK

    def _exchange_addresses(
        self, listeners: list[socket.socket], agreed: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        worker = self._worker
        # With HVDLITE_HOST_ID, a rank acts as another host than the one that its launcher knows.
        said = (worker.local_rank, worker.local_size, worker.node)
        own = {
            "host": host_identity(worker.host_id),
            "said": said if worker.host_id is None else (),
            "unix": address_of(listeners[0]),
            "tcp": address_of(listeners[1]),
            "agreed": dict(agreed),
        }
        blobs = self._client.exchange("addresses", json.dumps(own).encode())
        # The addresses are fresh in every start. So their digest, as the epoch of the handshakes,
        # refuses processes that are left over from an earlier start or a failed one.
        digest = hashlib.sha256(b"%d" % worker.epoch + b"".join(blobs)).digest()
        epoch = int.from_bytes(digest[:_EPOCH_BYTES], "little")
        self._job = Job(worker.token, worker.job_id, epoch)
        return [json.loads(blob) for blob in blobs]

    def _run(
        self, listeners: list[socket.socket], peers: list[dict[str, Any]], topology: Topology
    ) -> None:
        """Accept the higher ranks in a second thread while this one dials the lower ranks."""
        ended = threading.Event()

        def accept() -> None:
            try:
                self._accept_all(listeners, topology)
            finally:
                ended.set()

        accepting = threading.Thread(target=accept, name="hvdlite-accept", daemon=True)
        accepting.start()
        try:
            for rank in range(self._worker.rank):
                self._dial(rank, peers[rank], topology)
            ended.wait()
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            _outlast(ended)
            accepting.join()
        if self._failure is not None:
            raise self._failure

    def _dial(self, rank: int, peer: dict[str, Any], topology: Topology) -> None:
        local = topology.host_of[rank] == topology.host_of[self._worker.rank]
        roles = [Role.CONTROL] if local else [Role.CONTROL, Role.DATA]
        for role in roles:
            address = peer["unix"] if local else peer["tcp"]
            try:
                connection, _ = introduce(
                    address, self._job, self._worker.rank, role, self._deadline
                )
            except GivenUpError:
                raise
            except OSError as error:
                raise BootstrapError(
                    f"rank {self._worker.rank} cannot reach rank {rank}: {error}"
                ) from error
            except BootstrapError as error:
                raise BootstrapError(f"rank {rank}: {error}") from error
            if role == Role.DATA:
                self._links[rank].data = connection
                continue
            self._links[rank].passing = connection
            if not local:
                self._promote(rank)
                continue
            try:
                self._deadline.attempt(connection, lambda: self._give_memory(rank))
                self._deadline.attempt(connection, lambda: self._take_memory(rank))
            except TimeoutError:
                raise BootstrapError(f"rank {rank} did not pass its memory in time") from None

    def _accept_all(self, listeners: list[socket.socket], topology: Topology) -> None:
        """Accept until every higher rank is connected, something fails, or the deadline passes."""
        acceptors = [
            Acceptor(listener, self._job, self._worker.size, self._selector, self._welcome)
            for listener in listeners
        ]
        try:
            while self._failure is None and (missing := self._missing(topology)):
                for key, _ in self._selector.select(self._deadline.check()):
                    handle: Callable[[], None] = key.data
                    handle()
                for acceptor in acceptors:
                    acceptor.expire()
        except TimeoutError:
            self._failure = self._failure or BootstrapError(
                f"rank {missing[0]} did not connect to rank {self._worker.rank} in time"
            )
        except BaseException as error:
            self._failure = self._failure or error
        for acceptor in acceptors:
            acceptor.close()

    def _missing(self, topology: Topology) -> list[int]:
        missing = []
        for rank in range(self._worker.rank + 1, self._worker.size):
            link = self._links[rank]
            local = topology.host_of[rank] == topology.host_of[self._worker.rank]
            if link.control is None or (link.data is None and not local):
                missing.append(rank)
        return missing

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        rank, role = handshake.rank, handshake.role
        link = self._links.get(rank)
        if link is None or rank < self._worker.rank or role == Role.STORE:
            connection.close()
        elif role == Role.DATA and link.data is None:
            link.data = connection
        elif role == Role.CONTROL and link.control is None and link.passing is None:
            link.passing = connection
            self._swap_memory(rank, connection)
        else:
            connection.close()

    def _swap_memory(self, rank: int, connection: socket.socket) -> None:
        """Pass this rank's memory to a higher rank, and take that rank's memory when it arrives."""
        if connection.family != socket.AF_UNIX:
            self._promote(rank)
            return
        connection.setblocking(False)
        self._give_memory(rank)

        def take() -> None:
            with contextlib.suppress(BlockingIOError):
                self._take_memory(rank)
                self._selector.unregister(connection)

        self._selector.register(connection, selectors.EVENT_READ, take)

    def _promote(self, rank: int) -> None:
        link = self._links[rank]
        link.control, link.passing = link.passing, None

    def _give_memory(self, rank: int) -> None:
        connection = self._links[rank].passing
        assert connection is not None
        try:
            socket.send_fds(connection, [b"f"], [self._segment, self._bell])
        except TimeoutError:
            raise
        except OSError as error:
            raise BootstrapError(f"rank {rank} did not take memory: {error}") from error

    def _take_memory(self, rank: int) -> None:
        """Receive a peer's memory and bell, which completes the connection to it."""
        link = self._links[rank]
        assert link.passing is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(link.passing, 1, 2, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError as error:
            raise BootstrapError(f"rank {rank} did not pass its memory: {error}") from error
        if data != b"f" or len(descriptors) != 2:
            for fd in descriptors:
                os.close(fd)
            raise BootstrapError(f"rank {rank} left before it passed its memory")
        link.segment, link.bell = descriptors
        self._promote(rank)

    def _close(self) -> None:
        for link in self._links.values():
            link.close()
        for fd in (self._segment, self._bell):
            if fd >= 0:
                os.close(fd)

    def _result(self, topology: Topology, clock: ClockOffset) -> Connection:
        return Connection(
            rank=self._worker.rank,
            size=self._worker.size,
            host_of=topology.host_of,
            links=tuple(link.release(rank) for rank, link in self._links.items()),
            segment_fd=self._segment,
            bell_fd=self._bell,
            local_rank=topology.local_rank,
            local_size=topology.local_size,
            cross_rank=topology.cross_rank,
            cross_size=topology.cross_size,
            clock=clock,
        )


def _outlast(ended: threading.Event) -> None:
    """Wait until a thread has ended, even if signal handlers raise meanwhile; then re-raise.

    The caller closes what the thread uses, so it must not go on earlier. `Thread.join` is not
    enough: up to Python 3.12 it regards a thread as ended when a signal handler raises during it.
    """
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
