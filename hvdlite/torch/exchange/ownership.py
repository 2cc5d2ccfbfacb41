"""Divides whole parameters among ranks: each parameter has an owner, and perhaps further copies.

All ranks compute the same division from the same parameters, without communication. A parameter
keeps its owner, because the owner has the optimizer's state for it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite import basics
from hvdlite.process_sets import ProcessSet


def successors(hosts: Sequence[int]) -> list[list[int]]:
    """List for each rank the other ranks that copy what it owns, the best one first."""
    # The first copy is on the next host, so that the end of one host leaves a copy. Ranks of one
    # host spread their copies over the ranks of the next host. `hosts` has the host of each rank:
    # for [0, 0, 1, 1] the result is [[2, 3, 1], [3, 2, 0], [0, 1, 3], [1, 0, 2]].
    order = list(dict.fromkeys(hosts))
    members = {host: [rank for rank, its in enumerate(hosts) if its == host] for host in order}
    result = []
    for rank, host in enumerate(hosts):
        index, begin = members[host].index(rank), order.index(host)
        following: list[int] = []
        for step in range(1, len(order) + 1):
            there = members[order[(begin + step) % len(order)]]
            start = index + 1 if step == len(order) else index
            following += [there[(start + i) % len(there)] for i in range(len(there))]
        result.append([other for other in following if other != rank])
    return result


class Ownership:
    """The owner of each parameter, for ranks that are numbered from zero. Used by one thread."""

    def __init__(self, hosts: Sequence[int], copies: int) -> None:
        """Begin without parameters; `hosts` has the host of each rank."""
        self.copies = copies  # The owner and copies - 1 other ranks have a parameter's state.
        self._loads = [0] * len(hosts)  # The unit is bytes.
        self._copiers = [others[: copies - 1] for others in successors(hosts)]
        self._owners: dict[torch.Tensor, int] = {}

    def take(self, params: Sequence[torch.Tensor]) -> None:
        """Give each parameter without an owner to the least loaded rank, the largest first."""
        new = [param for param in params if param not in self._owners]
        for param in sorted(new, key=_bytes_of, reverse=True):
            owner = self._loads.index(min(self._loads))
            self._owners[param] = owner
            self._loads[owner] += _bytes_of(param)

    def of_copies(self, copied: Mapping[int, Any]) -> Ownership:
        """Return the same division of deep copies of the parameters, by the memo of `deepcopy`."""
        other = copy.copy(self)
        other._loads = list(self._loads)
        owners = self._owners.items()
        other._owners = {copied[id(param)]: one for param, one in owners if id(param) in copied}
        return other

    def owns(self, rank: int, param: torch.Tensor) -> bool:
        """Return whether the parameter has this owner."""
        return self._owners.get(param) == rank

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether the parameter has an owner."""
        return param in self._owners

    def owner(self, param: torch.Tensor) -> int:
        """Return the rank whose result for a parameter all ranks take."""
        return self._owners[param]

    def positions(self, params: Sequence[torch.Tensor], rank: int) -> list[int]:
        """List the positions of the parameters that have this owner."""
        return [position for position, param in enumerate(params) if self.owns(rank, param)]

    def has_state(self, param: torch.Tensor, rank: int) -> bool:
        """Return whether a rank updates a parameter: as its owner, or as one of its copies."""
        owner = self._owners.get(param)
        return owner is None or owner == rank or rank in self._copiers[owner]


class Division:
    """The ownership of parameters among the members of a process set, as they are now."""

    def __init__(self, process_set: ProcessSet, copies: int, by_host: bool = False) -> None:
        """Begin without an ownership; `by_host` divides among the members of each host."""
        self._process_set = process_set
        self.copies = copies
        self.by_host = by_host
        self.place = 0  # This rank has this position among the members.
        self._ownership: Ownership | None = None
        # This rank and the members are as they were when it began.
        self._world: tuple[int, ...] = ()

    def members(self) -> list[int]:
        """List the ranks that own parameters, in the order of their positions."""
        if not self.by_host:
            return list(self._process_set.ranks)
        hosts = basics.host_of()
        return [rank for rank in self._process_set.ranks if hosts[rank] == hosts[basics.rank()]]

    def present(self) -> Ownership:
        """Return the ownership, which begins anew when the ranks have changed."""
        members = self.members()
        world = (basics.rank(), *members)
        if self._ownership is None or world != self._world:
            hosts = basics.host_of()
            self._ownership = Ownership([hosts[rank] for rank in members], self.copies)
            self.place = members.index(basics.rank())
            self._world = world
        return self._ownership

    def of_copies(self, copied: Mapping[int, Any]) -> Division:
        """Return the same division of deep copies of the parameters, by the memo of `deepcopy`."""
        other = copy.copy(self)
        if self._ownership is not None:
            other._ownership = self._ownership.of_copies(copied)
        return other


def _bytes_of(param: torch.Tensor) -> int:
    return int(param.numel() * param.element_size())
