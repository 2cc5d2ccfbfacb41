"""From the hosts' identities and the launcher's words to everybody's place: pure functions.

Two things are kept apart. Which ranks share memory follows from the identity of their hosts. Local
ranks, by which scripts choose their GPU, are the launcher's, if it said any.

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


@dataclass(frozen=True)
class Said:
    """What its launcher said to one rank; see `WorkerEnvironment`."""

    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None


def place_ranks(host_ids: Sequence[str], rank: int, said: Sequence[Said] = ()) -> Place:
    """Number the hosts and find `rank`'s place.

    Args:
        host_ids: by rank, the identity of its host.
        rank: whose place to find.
        said: by rank, the launcher's words; taken when every rank has some and they are consistent,
            else the ranks of a host are counted.
    """
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
    return Place(
        host_of=host_of,
        local_rank=local_ranks[rank],
        local_size=local_size,
        cross_rank=across.index(nodes[rank]),
        cross_size=len(across),
    )


def _numbered(names: Sequence[object]) -> tuple[int, ...]:
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _nodes(host_ids: Sequence[str], said: Sequence[Said]) -> tuple[int, ...] | None:
    """Number the launcher's hosts; None when it did not number every rank within its host."""
    if not said or any(one.local_rank is None for one in said):
        return None
    named = all(one.node is not None for one in said)
    nodes = _numbered([one.node for one in said] if named else host_ids)
    seats = {(node, one.local_rank) for node, one in zip(nodes, said, strict=True)}
    return nodes if len(seats) == len(said) else None
