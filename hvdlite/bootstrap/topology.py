"""From the hosts' identities to everybody's place: pure functions.

Example:
    >>> from hvdlite.bootstrap.topology import place_ranks
    >>> place_ranks(["a", "a", "b"], rank=2)
    Place(host_of=(0, 0, 1), local_rank=0, local_size=1, cross_rank=1, cross_size=2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One rank's place among the hosts.

    Attributes:
        host_of: by rank, the index of its host, in order of first appearance.
    """

    host_of: tuple[int, ...]
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def place_ranks(host_ids: Sequence[str], rank: int) -> Place:
    """Number the hosts and find `rank`'s place.

    Args:
        host_ids: by rank, the identity of its host.
        rank: whose place to find.
    """
    numbers: dict[str, int] = {}
    host_of = tuple(numbers.setdefault(host_id, len(numbers)) for host_id in host_ids)
    locals_ = [r for r, host in enumerate(host_of) if host == host_of[rank]]
    local_rank = locals_.index(rank)
    # Hosts that have a rank of this local rank, in order.
    across = [host for host in range(len(numbers)) if host_of.count(host) > local_rank]
    return Place(
        host_of=host_of,
        local_rank=local_rank,
        local_size=len(locals_),
        cross_rank=across.index(host_of[rank]),
        cross_size=len(across),
    )
