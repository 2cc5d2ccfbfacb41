"""Number the ranks of a job over its hosts; pure arithmetic.

A *placement* is the host and the numbers that a rank gets. Hosts are indexes here. `local_rank`
counts the ranks of a host, and `cross_rank` counts the hosts that have a rank of the same local
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The host of one rank, and its numbers."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: int  # the index of its host, in order of first appearance


def place(ranks_per_host: Sequence[int]) -> list[Placement]:
    """Place ranks host by host: `ranks_per_host[h]` ranks on host h."""
    return place_as([host for host, count in enumerate(ranks_per_host) for _ in range(count)])


def place_as(hosts: Sequence[int]) -> list[Placement]:
    """Place ranks in any order: rank r on host `hosts[r]`."""
    local_sizes: dict[int, int] = {}
    local_ranks = []
    for host in hosts:
        local_ranks.append(local_sizes.get(host, 0))
        local_sizes[host] = local_ranks[-1] + 1
    order = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    placements = []
    for rank, host in enumerate(hosts):
        peers = [h for h in order if local_sizes[h] > local_ranks[rank]]
        placements.append(
            Placement(
                rank=rank,
                size=len(hosts),
                local_rank=local_ranks[rank],
                local_size=local_sizes[host],
                cross_rank=peers.index(host),
                cross_size=len(peers),
                host=order[host],
            )
        )
    return placements


def threads_per_rank(cores: int, local_size: int) -> int:
    """Share the cores of a host among its ranks; at least one thread each."""
    return max(1, cores // local_size)
