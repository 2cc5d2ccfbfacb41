"""What the engine needs of a world: this rank's numbers, its connections, and its clock."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.deadline import Deadline

ROUNDS = 16
_READING = struct.Struct("<q")


class ClockOffset(NamedTuple):
    """The offset of this host's clock, and its largest error; both in nanoseconds."""

    # A reading of this host's clock plus the offset is a reading of rank 0's clock. Afterwards
    # clocks drift apart, by some microseconds per second unless the hosts synchronise them.

    nanoseconds: int
    error: int


SAME_CLOCK = ClockOffset(0, 0)


@dataclass(frozen=True)
class Topology:
    """One rank's numbers in a world, and the hosts of all ranks; by default a world of one."""

    rank: int = 0
    size: int = 1
    # By rank, the index of its host; hosts are numbered in order of first appearance.
    host_of: tuple[int, ...] = (0,)
    local_rank: int = 0  # the rank's number within its host
    local_size: int = 1  # how many ranks its host has
    # The number of its host among the hosts that have a rank of this local rank, and how many have.
    cross_rank: int = 0
    cross_size: int = 1

    def numbers(self) -> dict[str, Any]:
        """Return the fields of this class by name, to make one of a subclass."""
        return {one.name: getattr(self, one.name) for one in fields(Topology)}


@dataclass(frozen=True)
class Connection(Topology):
    """The arguments of `_core.Engine`, and this rank's numbers."""

    # The default is a world of one. The caller owns all descriptors.

    # For each peer, its rank and the descriptors of its control and data connections, segment and
    # event; -1 stands for a descriptor that does not exist. For a peer of this host, the control
    # connection is the end of its lifeline (see `local_peers`).
    links: Sequence[tuple[int, int, int, int, int]] = ()
    segment_fd: int = -1  # this rank's own shared memory segment
    event_fd: int = -1  # this rank's own event
    lifeline_fd: int = -1  # this rank's own end of its lifeline
    clock: ClockOffset = SAME_CLOCK  # the offset of this host's clock to rank 0's
    control_tree: bool = False  # whether control connections between hosts are those of a tree

    def close(self) -> None:
        """Close the descriptors, when no engine takes them."""
        close_all((self.segment_fd, self.event_fd, self.lifeline_fd))
        for link in self.links:
            close_all(link[1:])


def close_all(descriptors: Iterable[int]) -> None:
    """Close those that exist; -1 stands for one that does not."""
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


class UnreachableError(BootstrapError):
    """A peer could not be reached, did not connect in time, or left while it connected."""

    def __init__(self, message: str, rank: int = -1, silent: bool = False) -> None:
        super().__init__(message)
        self.rank = rank  # the peer's rank in the epoch whose connections were made
        self.silent = silent  # the network did not answer: either end may be cut off


NOTHING_SHARED = (-1, -1, -1)


@dataclass
class Link:
    """The connections to one peer, while they are made."""

    # A peer of another host has `data`, and `control` if the two are linked.
    linked: bool = True
    control: socket.socket | None = None
    data: socket.socket | None = None
    # A peer of this host has the descriptors of its segment, its event and its lifeline; owned.
    shared: Sequence[int] = NOTHING_SHARED

    @property
    def connected(self) -> bool:
        """Whether the link to a peer of another host is complete."""
        return self.data is not None and (self.control is not None or not self.linked)

    def close(self) -> None:
        for connection in (self.control, self.data):
            if connection is not None:
                connection.close()
        close_all(self.shared)
        self.shared = NOTHING_SHARED

    def release(self, rank: int) -> tuple[int, int, int, int, int]:
        """Give up the descriptors, in the order of `Connection.links`."""
        segment, event, control = self.shared
        self.shared = NOTHING_SHARED
        if self.control is not None:
            control = _release(self.control)
        data = -1 if self.data is None else _release(self.data)
        return (rank, control, data, segment, event)


def _release(connection: socket.socket) -> int:
    connection.setblocking(False)
    return connection.detach()


# Two questions about hosts have separate answers. The identities of the hosts decide which ranks
# share memory. The launcher decides the local ranks, by which scripts choose their GPU, if it tells
# local ranks.


@dataclass(frozen=True)
class LauncherNumbers:
    """The numbers that the launcher told one rank; see `WorkerEnvironment`."""

    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None


def find_topology(
    host_ids: Sequence[str], rank: int, said: Sequence[LauncherNumbers] = ()
) -> Topology:
    # `said` has, by rank, the launcher's numbers. They are used if every rank has a local rank and
    # no two ranks have the same one on one host. Otherwise the ranks of a host are counted.
    host_of = _numbered(host_ids)
    nodes = _nodes(host_ids, said)
    if nodes is None:
        nodes = host_of
        local_ranks = [host_of[:r].count(host) for r, host in enumerate(host_of)]
        local_size = host_of.count(host_of[rank])
    else:
        local_ranks = [one.local_rank or 0 for one in said]
        local_size = said[rank].local_size or nodes.count(nodes[rank])
    # Hosts that have a rank of this local rank; their numbers are in order of first appearance.
    across = sorted(
        node
        for node, local_rank in zip(nodes, local_ranks, strict=True)
        if local_rank == local_ranks[rank]
    )
    return Topology(
        rank=rank,
        size=len(host_ids),
        host_of=host_of,
        local_rank=local_ranks[rank],
        local_size=local_size,
        cross_rank=across.index(nodes[rank]),
        cross_size=len(across),
    )


def are_linked(host_of: Sequence[int], one: int, other: int) -> bool:
    """Return whether two ranks of different hosts have a control connection in a tree of hosts."""
    # The first ranks of the hosts form a binary tree, as in csrc/transport/topology.h.
    host, above = sorted((host_of[one], host_of[other]), reverse=True)
    if (host - 1) // 2 != above:
        return False
    return {host_of.index(host), host_of.index(above)} == {one, other}


def _numbered(names: Sequence[object]) -> tuple[int, ...]:
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _nodes(host_ids: Sequence[str], said: Sequence[LauncherNumbers]) -> tuple[int, ...] | None:
    """Number the launcher's hosts; None if its local ranks are missing or contradictory."""
    if not said or any(one.local_rank is None for one in said):
        return None
    named = all(one.node is not None for one in said)
    nodes = _numbered([one.node for one in said] if named else host_ids)
    distinct = {(node, one.local_rank) for node, one in zip(nodes, said, strict=True)}
    return nodes if len(distinct) == len(said) else None


# The offset between this host's monotonic clock, which counts from its boot, and that of rank 0's
# host puts the timeline's events of all hosts on one clock. In one round, the client notes when it
# asks and when the answer arrives, and the server reads its clock in between. If the client assumes
# that the server read its clock in the middle, the error is at most half of the round trip. So the
# quickest of several rounds has the smallest error (F. Cristian, "Probabilistic clock
# synchronization", Distributed Computing 3, 1989).


def measure_offset(connection: socket.socket, deadline: Deadline) -> ClockOffset:
    """Measure the offset; the peer at the other end calls `answer_readings` meanwhile."""
    best: ClockOffset | None = None
    for _ in range(ROUNDS):
        asked = time.monotonic_ns()
        connection.sendall(b"?")
        (reading,) = _READING.unpack(_receive(connection, _READING.size, deadline))
        answered = time.monotonic_ns()
        error = (answered - asked + 1) // 2
        if best is None or error < best.error:
            best = ClockOffset(reading - (asked + answered) // 2, error)
    assert best is not None
    return best


def answer_readings(connection: socket.socket, deadline: Deadline) -> None:
    """Answer the questions of the peer's `measure_offset`."""
    for _ in range(ROUNDS):
        _receive(connection, 1, deadline)
        connection.sendall(_READING.pack(time.monotonic_ns()))


def _receive(connection: socket.socket, length: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < length:
        more = deadline.receive(connection, length - len(data))
        if not more:
            raise BootstrapError("a rank left while the clocks were compared")
        data += more
    return data
