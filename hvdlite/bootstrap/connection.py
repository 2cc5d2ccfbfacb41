"""What the engine needs of a world: this rank's numbers, and the descriptors of its connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.bootstrap.clock import SAME_CLOCK, ClockOffset


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

    Example:
        >>> Connection().size
        1
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
class Link:
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
        """Close everything that was not released."""
        for connection in (self.control, self.data, self.passing):
            if connection is not None:
                connection.close()
        for fd in (self.segment, self.bell):
            if fd >= 0:
                os.close(fd)
        self.segment = self.bell = -1

    def release(self, rank: int) -> tuple[int, int, int, int, int]:
        """Give up the descriptors, in the order of `Connection.links`."""
        descriptors = []
        for connection in (self.control, self.data):
            if connection is None:
                descriptors.append(-1)
                continue
            connection.setblocking(False)
            descriptors.append(connection.detach())
        segment, bell, self.segment, self.bell = self.segment, self.bell, -1, -1
        return (rank, descriptors[0], descriptors[1], segment, bell)
