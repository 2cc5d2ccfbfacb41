"""What the engine needs of a world: this rank's numbers, and the descriptors of its connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.clock import SAME_CLOCK, ClockOffset


@dataclass(frozen=True)
class Connection:
    """The arguments of `_core.Engine`, and this rank's local and cross ranks."""

    # The default is a world of one. The caller owns all descriptors.

    rank: int = 0
    size: int = 1
    host_of: Sequence[int] = (0,)  # Each rank's host has this index.
    # For each peer, its rank and the descriptors of its control and data connections, segment and
    # event; -1 stands for a descriptor that does not exist. For a peer of this host, the control
    # connection is the end of its lifeline (see `local_peers`).
    links: Sequence[tuple[int, int, int, int, int]] = ()
    segment_fd: int = -1  # this rank's own shared memory segment
    event_fd: int = -1  # this rank's own event
    lifeline_fd: int = -1  # this rank's own end of its lifeline
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    clock: ClockOffset = SAME_CLOCK  # the offset of this host's clock to rank 0's
    control_tree: bool = False  # whether control connections between hosts are those of a tree

    def close(self) -> None:
        """Close the descriptors, when no engine takes them."""
        descriptors = [
            self.segment_fd,
            self.event_fd,
            self.lifeline_fd,
            *(fd for link in self.links for fd in link[1:]),
        ]
        for fd in descriptors:
            if fd >= 0:
                os.close(fd)


class UnreachableError(BootstrapError):
    """A peer could not be reached, did not connect in time, or left while it connected."""

    def __init__(self, message: str, rank: int = -1, silent: bool = False) -> None:
        super().__init__(message)
        self.rank = rank  # the peer's rank in the epoch whose connections were made
        # This says whether the network did not answer: then either end may be the one that is cut
        # off.
        self.silent = silent


@dataclass
class Link:
    """The connections to one peer, while they are made."""

    # A peer of another host has `data`, and `control` if the two are linked; one of this host has
    # the rest.

    linked: bool = True

    control: socket.socket | None = None
    data: socket.socket | None = None
    segment: int = -1
    event: int = -1
    lifeline: int = -1

    @property
    def connected(self) -> bool:
        """Whether the link to a peer of another host is complete."""
        return self.data is not None and (self.control is not None or not self.linked)

    def descriptors(self) -> tuple[int, int, int]:
        """Return the descriptors of a peer of this host."""
        return (self.segment, self.event, self.lifeline)

    def take_neighbour(self, descriptors: Sequence[int]) -> None:
        """Own the descriptors of a peer of this host, in the order of `descriptors`."""
        self.segment, self.event, self.lifeline = descriptors

    def close(self) -> None:
        """Close everything that was not released."""
        for connection in (self.control, self.data):
            if connection is not None:
                connection.close()
        for fd in self.descriptors():
            if fd >= 0:
                os.close(fd)
        self.take_neighbour((-1, -1, -1))

    def release(self, rank: int) -> tuple[int, int, int, int, int]:
        """Give up the descriptors, in the order of `Connection.links`."""
        segment, event, control = self.descriptors()
        self.take_neighbour((-1, -1, -1))
        if self.control is not None:
            control = _release(self.control)
        data = -1 if self.data is None else _release(self.data)
        return (rank, control, data, segment, event)


def _release(connection: socket.socket) -> int:
    connection.setblocking(False)
    return connection.detach()
