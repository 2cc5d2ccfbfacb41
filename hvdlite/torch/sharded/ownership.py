"""Divides whole parameters among ranks: each parameter has an owner.

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


class Ownership:
    """The owner of each parameter, for ranks that are numbered from zero. Used by one thread."""

    def __init__(self, ranks: int) -> None:
        """Begin without parameters, for so many ranks."""
        self._loads = [0] * ranks  # The unit is bytes.
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

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether the parameter has an owner."""
        return param in self._owners

    def owner(self, param: torch.Tensor) -> int:
        """Return the owner of a parameter."""
        return self._owners[param]

    def has_state(self, rank: int, param: torch.Tensor) -> bool:
        """Return whether a rank updates a parameter: as its owner, or because it has none."""
        return self._owners.get(param, rank) == rank


class Division:
    """The ownership of parameters among the members of a process set, as they are now."""

    def __init__(self, process_set: ProcessSet, by_host: bool = False) -> None:
        """Begin without an ownership; `by_host` divides among the members of each host."""
        self._process_set = process_set
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
            self._ownership = Ownership(len(members))
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
