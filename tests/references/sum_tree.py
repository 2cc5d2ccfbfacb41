"""The tree by which the ranks of a process set are reduced on CPUs, written as it is defined."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def reduce_by_tree(
    values: Sequence[T],
    combine: Callable[[T, T], T],
    hosts: Sequence[int] | None = None,
    of_host: Callable[[T], T] = lambda value: value,
) -> T:
    """Combine the members' values, in the order of the members.

    Args:
        values: by member of the process set.
        combine: makes one value of those of two nodes.
        hosts: by member, the number of its host; None: one host has them all.
        of_host: what a host makes of its ranks' value, where there are several hosts.
    """
    by_host: dict[int, list[T]] = {}
    for value, host in zip(values, hosts or itertools.repeat(0), strict=False):
        by_host.setdefault(host, []).append(value)

    def within(ranks: list[T]) -> T:
        if len(ranks) == 1:
            return ranks[0]
        half = (len(ranks) + 1) // 2
        return combine(within(ranks[:half]), within(ranks[half:]))

    def across(nodes: list[list[T]]) -> T:
        if len(nodes) == 1:
            return of_host(within(nodes[0]))
        before = list(itertools.accumulate(len(ranks) for ranks in nodes))
        half = (before[-1] + 1) // 2
        # As near as can be to the half; of two cuts as near, the later one.
        cut = min(range(1, len(nodes)), key=lambda cut: (abs(before[cut - 1] - half), -cut))
        return combine(across(nodes[:cut]), across(nodes[cut:]))

    nodes = list(by_host.values())
    return across(nodes) if len(nodes) > 1 else within(nodes[0])
