"""Which virtual ranks each rank carries: the blocks that the core's sums over ranks fit together.

The core adds the ranks' tensors up in a balanced binary tree. A rank at depth d of it carries
virtual_size / 2^d virtual ranks and adds these up as a subtree, so that both together are the tree
over all virtual ranks.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NamedTuple

from hvdlite import _core, basics
from hvdlite.errors import ArgumentError


class Block(NamedTuple):
    """The virtual ranks of one rank: `size` of them, from `first` on."""

    first: int
    size: int


def check_virtual_size(size: Any) -> int:
    """Return a number of virtual ranks, or raise ArgumentError."""
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1 or number & (number - 1):
        raise ArgumentError(f"virtual_size={size!r}: give a power of two, such as 8")
    return number


class Blocks(NamedTuple):
    """The blocks of all ranks of one world."""

    epoch: int  # It is the number of the world in an elastic job.
    rank: int
    of_ranks: list[Block]

    @property
    def own(self) -> Block:
        """The block of this rank."""
        return self.of_ranks[self.rank]


def blocks_of_world(virtual_size: int) -> Blocks:
    """Return the blocks in the present world; raise ArgumentError for too many ranks."""
    world = basics.current_world()  # The membership thread may replace it at any time.
    for enough in (virtual_size << doublings for doublings in range(20)):
        with contextlib.suppress(ArgumentError):
            blocks = _core.virtual_blocks(world.host_of, enough)
            break
    if enough > virtual_size:
        raise ArgumentError(
            f"virtual_size={virtual_size} is too small for {world.size} ranks as they lie on "
            f"their hosts: give virtual_size={enough} or more, or start fewer ranks"
            + (" (--max-np)" if basics.in_elastic_job() else "")
        )
    return Blocks(world.epoch, world.rank, [Block(*one) for one in blocks])
