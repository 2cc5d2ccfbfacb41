"""Number the hosts of a job, and a rank within its host; pure functions.

Two questions have separate answers. The identities of the hosts decide which ranks share memory.
The launcher decides the local ranks, by which scripts choose their GPU, if it tells local ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The hosts of all ranks, and one rank's numbers among them."""

    # By rank, the index of its host; hosts are numbered in order of first appearance.
    host_of: tuple[int, ...]
    local_rank: int  # the rank's number within its host
    local_size: int  # how many ranks its host has
    cross_rank: int  # the number of its host among the hosts that have a rank of this local rank
    cross_size: int  # how many hosts have a rank of this local rank


@dataclass(frozen=True)
class LauncherNumbers:
    """The numbers that the launcher told one rank; see `WorkerEnvironment`."""

    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None


def find_topology(
    host_ids: Sequence[str], rank: int, said: Sequence[LauncherNumbers] = ()
) -> Topology:
    """Number the hosts, and one rank among them."""
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
        host_of=host_of,
        local_rank=local_ranks[rank],
        local_size=local_size,
        cross_rank=across.index(nodes[rank]),
        cross_size=len(across),
    )


def are_linked(host_of: Sequence[int], one: int, other: int) -> bool:
    """Return whether two ranks of different hosts have a control connection in a tree of hosts."""
    # The first ranks of the hosts form a binary tree, as in csrc/transport/control_tree.h.
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
