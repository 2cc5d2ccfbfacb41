"""Connect this rank to all others, whose endpoints the store or the registrar has told it.

The ranks of one host meet at the first of them (`local_peers`). Two ranks of different hosts have
two TCP connections, one for control and one for data; the higher rank dials the lower one. In a
world of more than `_LARGEST_STAR` ranks, control messages go through a tree of hosts, and only its
neighbours have a control connection. One thread takes what comes, and others dial meanwhile.

In an elastic job one epoch follows the other, and the ranks do not begin an epoch at the same time.
A peer that is still in another epoch refuses this rank's handshake, so this rank dials again until
the peer has caught up. A peer whose listener has gone has died, so this rank reports it soon: the
registrar then decides who goes on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import descriptors
from hvdlite.rendezvous.address import (
    address_of,
    fresh_unix_address,
    interface_address,
    listen,
    listen_on_loopback,
)
from hvdlite.rendezvous.client import introduce
from hvdlite.rendezvous.connection import (
    SAME_CLOCK,
    ClockOffset,
    Connection,
    LauncherNumbers,
    Link,
    UnreachableError,
    answer_readings,
    are_linked,
    close_all,
    find_topology,
    measure_offset,
)
from hvdlite.rendezvous.deadline import SLICE_SECONDS, Deadline, GivenUpError
from hvdlite.rendezvous.descriptors import make_room
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import Job, OtherEpochError, RefusedError, Role, ServerHandshake
from hvdlite.rendezvous.local_peers import LocalPeers
from hvdlite.rendezvous.service import Acceptor
from hvdlite.rendezvous.store import StoreClient, serve_store

_EPOCH_BYTES = 4
_GONE_SECONDS = 0.3  # how long a listener of an elastic job may refuse before its process is dead
_AGAIN_SECONDS = 0.02  # until this rank dials a peer again that refused it
_DIALS_AT_ONCE = 64  # peers that this rank dials at the same time, in a thread each
_LARGEST_STAR = 64  # ranks to each of which rank 0 can well answer by itself
# No process of the peer's host causes these: they come from this kernel, or from a router.
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


def connect(
    worker: WorkerEnvironment,
    create_segment: Callable[[int], int],
    agreed: Mapping[str, str],
    deadline: Deadline,
) -> Connection:
    """Connect this rank to all others, which it meets through the store."""
    # `create_segment` takes how many ranks this host has, makes the memory that they share, and
    # returns its descriptor. `deadline` limits the whole start, and another thread may give it up.
    # An error names the rank at fault.
    if worker.size == 1:
        return Connection()
    job = Job(worker.token, worker.job_id, worker.epoch)
    assert worker.rendezvous is not None
    with contextlib.ExitStack() as stack:
        address = worker.rendezvous
        if worker.serves_store:
            address = stack.enter_context(serve_store(worker, job, deadline)).address
        client = stack.enter_context(StoreClient(address, job, worker.rank, deadline))
        endpoint = stack.enter_context(Endpoint(worker, client.local_host, agreed))
        members = client.exchange("addresses", endpoint.description)
        job = Job(worker.token, worker.job_id, _epoch_of(worker.epoch, members))

        def meet(clock: Any) -> list[Any]:
            return client.exchange(f"connected/{job.epoch}", clock)

        mesh = Mesh(endpoint, worker.rank, members, job, create_segment, deadline)
        return mesh.connect(meet)


def _epoch_of(epoch: int, members: Sequence[Any]) -> int:
    """Derive the epoch of the handshakes between ranks that met through the store."""
    # The addresses are fresh in every start. So their digest, as the epoch of the handshakes,
    # refuses processes that are left over from an earlier start or a failed one.
    digest = hashlib.sha256(json.dumps([epoch, members]).encode()).digest()
    return int.from_bytes(digest[:_EPOCH_BYTES], "little")


class Endpoint(contextlib.AbstractContextManager["Endpoint"]):
    """The listeners of this process, for one epoch or for several in a row."""

    # Addresses are abstract Unix sockets, and ports that the kernel chooses. So no files stay
    # behind, and the listeners disappear with the process: forked children close their copies. A
    # peer that dials between two epochs waits in a listener's queue until the next epoch begins
    # here.

    def __init__(
        self, worker: WorkerEnvironment, own_host: str | None, agreed: Mapping[str, str]
    ) -> None:
        # `own_host` is the IP address at which other hosts reach this one, unless `worker` has a
        # `bind_address` or names an interface; None if all processes share this host.
        if worker.bind_address is not None:
            own_host = worker.bind_address
        elif worker.interfaces:
            own_host = interface_address(worker.interfaces)
        self.elastic = worker.elastic  # whether the process is a worker of an elastic job
        self._listeners = [listen(fresh_unix_address())]
        try:
            self._listeners.append(listen(f"{own_host}:0") if own_host else listen_on_loopback())
            # As JSON: what others need to connect to this process, and to check that it fits.
            self.description = self._describe(worker, agreed)
        except BaseException:
            self.close()
            raise
        descriptors.leave_to_parent(self)

    def _describe(self, worker: WorkerEnvironment, agreed: Mapping[str, str]) -> dict[str, Any]:
        # The number of ranks on a host changes from epoch to epoch, so there it is counted.
        local_size = None if worker.elastic else worker.local_size
        said = (worker.local_rank, local_size, worker.node)
        return {
            "host": host_identity(worker.host_id),
            # With HVDLITE_HOST_ID, a rank acts as another host than the one its launcher knows.
            "said": said if worker.host_id is None else (),
            "unix": address_of(self._listeners[0]),
            "tcp": address_of(self._listeners[1]),
            "agreed": dict(agreed),
        }

    def listeners(self) -> list[socket.socket]:
        """Return duplicates of the listeners, for one epoch; the caller owns them."""
        return [listener.dup() for listener in self._listeners]

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    close_in_child = close

    def __exit__(self, *_: object) -> None:
        self.close()


def host_identity(override: str | None) -> str:
    """Return a text that identifies this host; ranks with equal texts share memory."""
    # A host name alone is not enough. The text also depends on the network namespace (containers),
    # the user, and the boot. `override` stands for all of these, so that tests can let one machine
    # act as several hosts.
    if override is not None:
        return "override:" + override
    parts = [socket.gethostname(), str(os.getuid()), str(Path("/proc/self/ns/net").stat().st_ino)]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


class Mesh:
    """This rank's connections to the ranks whose endpoints are given, while they are made."""

    # `peers` has, by rank, the description of each endpoint; this rank's own one is among them.
    # `deadline` limits everything but `meet`. When another thread gives it up, `connect` ends
    # within 50 ms, unless the process does not get the CPU. `answer_seconds` says how long the
    # kernel of another host may take to answer, however late the member there is; 0 means until the
    # deadline.

    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        peers: Sequence[Mapping[str, Any]],
        job: Job,
        create_segment: Callable[[int], int],
        deadline: Deadline,
        answer_seconds: float = 0.0,
    ) -> None:
        _check_agreed([peer["agreed"] for peer in peers])
        self._endpoint = endpoint
        self._rank = rank
        self._peers = peers
        self._job = job
        self._create_segment = create_segment
        self._deadline = deadline
        self._answer_seconds = answer_seconds
        self._topology = find_topology(
            [peer["host"] for peer in peers],
            rank,
            [LauncherNumbers(*peer["said"]) for peer in peers],
        )
        host_of = self._topology.host_of
        self._tree = len(peers) > _LARGEST_STAR and max(host_of) > 0
        self._links = {peer: Link() for peer in range(len(peers)) if peer != rank}
        for peer, link in self._links.items():
            link.linked = not self._tree or are_linked(host_of, rank, peer)
        # The peers of other hosts to which this rank is not connected yet.
        self._distant = {peer for peer in self._links if not self._is_local(peer)}
        self._segment = self._event = self._lifeline = -1
        self._dial_deadline = Deadline(0, outer=deadline)  # of the threads that dial
        self._failures: list[BaseException] = []  # theirs
        self._local_peers: LocalPeers | None = None
        self._listeners: list[socket.socket] = []

    def connect(self, meet: Callable[[Any], list[Any]]) -> Connection:
        # `meet` is called with this rank's clock, as a JSON value, when this rank has all its
        # connections; it waits until all ranks have theirs, and returns the clocks by rank.
        # UnreachableError: a member cannot be reached, or did not connect in time.
        descriptors.leave_to_parent(self)
        try:
            if self._links:
                # The launcher may take one host with two names for two hosts, and count less.
                locals_ = [one for one in range(len(self._peers)) if self._is_local(one)]
                self._segment = self._create_segment(len(locals_))
                self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._run(locals_)
            # No rank's engine starts before all ranks are connected, so that every rank has taken
            # over its sockets before a peer writes to them.
            clocks = meet(list(self._compare_clocks()))
            first = self._topology.host_of.index(self._topology.host_of[self._rank])
            return self._result(ClockOffset(*clocks[first]))
        except BaseException:
            self._close()
            raise
        finally:
            descriptors.forget(self)

    def close_in_child(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._close()

    def _run(self, locals_: Sequence[int]) -> None:
        make_room(3 * len(locals_) + 2 * len(self._distant), len(self._peers))
        selector = selectors.DefaultSelector()
        own = (self._segment, self._event)
        local_peers = self._local_peers = LocalPeers(
            self._rank, locals_, self._links, own, selector, self._dial_deadline
        )
        self._listeners = self._endpoint.listeners()
        acceptors = [
            Acceptor(listener, self._job, len(self._peers), selector, self._welcome)
            for listener in self._listeners
        ]
        woken = os.eventfd(0, os.EFD_CLOEXEC)
        selector.register(woken, selectors.EVENT_READ, lambda: os.eventfd_read(woken))
        lower = sorted(peer for peer in self._distant if peer < self._rank)
        dials: list[Callable[[], None]] = []
        if (first := local_peers.first) != self._rank:
            dials.append(lambda: local_peers.hand_in(self._reach(first, Role.CONTROL)))
        needed = len(dials) + min(len(lower), 1)
        dials += [partial(self._dial_some, iter(lower))] * min(len(lower), _DIALS_AT_ONCE)
        threads: list[threading.Thread] = []
        try:
            for one in dials:
                thread = threading.Thread(target=self._dial, args=(one, woken), daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    if len(threads) >= needed:
                        break
                    raise BootstrapError(
                        f"rank {self._rank} cannot connect to the others: {error}; allow more "
                        "processes (`ulimit -u`, or the limit of the container)"
                    ) from None
                threads.append(thread)
            while self._distant or not local_peers.complete:
                self._deadline.refuse_if_given_up()
                for key, _ in selector.select(SLICE_SECONDS):
                    key.data()
                for acceptor in acceptors:
                    acceptor.expire()
                if self._failures:
                    raise self._failures[0]
                self._check_missing(local_peers)
        except UnreachableError as error:
            local_peers.tell(error)
            raise
        finally:
            self._dial_deadline.give_up()
            for thread in threads:
                thread.join()
            for acceptor in acceptors:
                acceptor.close()
            selector.close()
            os.close(woken)
        self._lifeline = local_peers.release()

    def _dial(self, call: Callable[[], None], woken: int) -> None:
        """Run a thread that dials: it wakes the loop when it is done, or has failed."""
        try:
            call()
        except BaseException as error:
            self._failures.append(error)
        os.eventfd_write(woken, 1)

    def _is_local(self, peer: int) -> bool:
        return self._topology.host_of[peer] == self._topology.host_of[self._rank]

    def _dial_some(self, peers: Iterator[int]) -> None:
        for peer in peers:
            link = self._links[peer]
            if link.linked:
                link.control = self._reach(peer, Role.CONTROL)
            link.data = self._reach(peer, Role.DATA)
            self._distant.discard(peer)

    def _reach(self, peer: int, role: Role) -> socket.socket:
        """Dial a peer and shake hands; in an elastic job, dial again as long as it helps."""
        gone_at = math.inf
        behind: OtherEpochError | None = None
        local = self._is_local(peer)
        address = self._peers[peer]["unix" if local else "tcp"]
        seconds = 0.0 if local else self._answer_seconds
        way = (address, self._job, self._rank, role, self._dial_deadline, seconds)
        while True:
            try:
                return introduce(*way)[0]
            except GivenUpError:
                raise
            except OtherEpochError as error:
                if not self._endpoint.elastic:
                    raise self._blame(peer, error) from error
                gone_at, behind = math.inf, error
            except (OSError, BootstrapError) as error:
                gone_at = min(gone_at, time.monotonic() + self._retry_seconds(error))
                if time.monotonic() >= gone_at:
                    # At the deadline, that the peer is in another epoch says more than that it is
                    # late.
                    cause = behind if behind is not None and self._deadline.passed else error
                    raise self._blame(peer, cause) from error
            with contextlib.suppress(TimeoutError):  # The next attempt says what is wrong.
                self._dial_deadline.sleep(_AGAIN_SECONDS)

    def _retry_seconds(self, error: Exception) -> float:
        """Return how many seconds an error of the way to a peer may last, because it may pass."""
        if not self._endpoint.elastic:
            return 0.0
        if isinstance(error, ConnectionRefusedError):
            return _GONE_SECONDS
        return self._answer_seconds if _is_silence(error) else 0.0

    def _blame(self, peer: int, error: Exception) -> BootstrapError:
        """Name the peer in an error of the way to it."""
        if isinstance(error, OSError):
            text = (
                f"rank {self._rank} cannot reach rank {peer}: {error}; "
                "HVDLITE_NETWORK_INTERFACES chooses the network"
            )
            silent = isinstance(error, TimeoutError) or _is_silence(error)
            return UnreachableError(text, peer, silent and not self._is_local(peer))
        text = f"rank {peer}: {error}"
        stranger = isinstance(error, RefusedError) and not isinstance(error, OtherEpochError)
        return BootstrapError(text) if stranger else UnreachableError(text, peer)

    def _check_missing(self, local_peers: LocalPeers) -> None:
        """At the deadline, name the first rank that should have connected to this one."""
        if not self._deadline.passed:
            return
        missing = [peer for peer in self._distant.copy() if peer > self._rank]
        missing += local_peers.missing()
        if missing:
            raise UnreachableError(
                f"rank {min(missing)} did not connect to rank {self._rank} in time", min(missing)
            )

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        peer, role = handshake.rank, handshake.role
        link = self._links.get(peer)
        local = connection.family == socket.AF_UNIX
        if link is None or peer < self._rank or local != self._is_local(peer):
            connection.close()
        elif local and role == Role.CONTROL:
            assert self._local_peers is not None
            self._local_peers.welcome(peer, connection)
        elif role == Role.DATA and link.data is None:
            link.data = connection
        elif role == Role.CONTROL and link.control is None and link.linked:
            link.control = connection
        else:
            connection.close()
        if link is not None and link.connected:
            self._distant.discard(peer)

    def _compare_clocks(self) -> ClockOffset:
        """Compare clocks over TCP: the first rank of every other host does so with rank 0."""
        rank, host_of = self._rank, self._topology.host_of
        firsts = [host_of.index(host) for host in range(1, max(host_of) + 1)]
        for peer in firsts if rank == 0 else [0] if rank in firsts else []:
            connection = self._links[peer].data
            assert connection is not None
            try:
                if rank != 0:
                    return measure_offset(connection, self._deadline)
                answer_readings(connection, self._deadline)
            except GivenUpError:
                raise
            except (OSError, BootstrapError) as error:
                raise UnreachableError(
                    f"rank {rank} could not compare its clock with rank {peer}'s: {error}", peer
                ) from error
        return SAME_CLOCK

    def _close(self) -> None:
        if self._local_peers is not None:
            self._local_peers.close()
        for link in self._links.values():
            link.close()
        close_all((self._segment, self._event, self._lifeline))
        self._segment = self._event = self._lifeline = -1

    def _result(self, clock: ClockOffset) -> Connection:
        return Connection(
            **self._topology.numbers(),
            links=tuple(link.release(peer) for peer, link in self._links.items()),
            segment_fd=self._segment,
            event_fd=self._event,
            lifeline_fd=self._lifeline,
            clock=clock,
            control_tree=self._tree,
        )


def _is_silence(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _SILENCE


def _check_agreed(settings: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have equal settings: otherwise they cut equal tensors differently."""
    for rank, own in enumerate(settings):
        for name, value in own.items():
            first = settings[0].get(name)
            if value != first:
                raise BootstrapError(
                    f"rank 0 has {name}={first}, rank {rank} has {name}={value}; every rank needs "
                    "the same value"
                )
