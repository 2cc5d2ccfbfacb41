"""Which virtual ranks each rank carries: the blocks that the core's sums over ranks fit together.

The core adds the ranks' tensors up in a balanced binary tree. A rank at depth d of it carries
virtual_size / 2^d virtual ranks and adds these up as a subtree, so that both together are the tree
over all virtual ranks.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NamedTuple

from hvdlite import basics
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import global_process_set


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


def blocks_of_ranks(virtual_size: int) -> list[Block]:
    """Return each rank's block in the present world; raise ArgumentError for too many ranks."""
    for enough in (virtual_size << doublings for doublings in range(20)):
        with contextlib.suppress(ArgumentError):
            blocks = basics.virtual_blocks(global_process_set, enough)
            break
    if enough > virtual_size:
        raise ArgumentError(
            f"virtual_size={virtual_size} is too small for {basics.size()} ranks as they lie on "
            f"their hosts: give virtual_size={enough} or more, or start fewer ranks"
        )
    return [Block(*one) for one in blocks]
