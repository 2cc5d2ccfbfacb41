"""Sends updated parameters from their owners to all ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite import basics
from hvdlite.errors import MismatchError
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.submit import start_allgather, take_received
from hvdlite.torch.collectives.tensors import Named, spec
from hvdlite.torch.optimizers.ownership import Ownership


@dataclass
class _Kind:
    """The parameters of one dtype and device, by owner."""

    of: list[list[torch.Tensor]]

    def rows(self, rank: int) -> int:
        """Count the elements that a rank sends."""
        return sum(param.numel() for param in self.of[rank])


class ParameterExchange:
    """Gives every rank the parameters that others have updated, in one allgather."""

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        ownership: Ownership,
        process_set: ProcessSet,
    ) -> None:
        """Plan it.

        Args:
            name: the name of the operation, unique on this rank.
            params: in the same order on all ranks; each has an owner.
            ownership: by position in the process set.
            process_set: this rank is a member.
        """
        self.params = list(params)
        self._name = name
        self._process_set = process_set
        self._own = process_set.ranks.index(basics.rank())
        self._copies = ownership.copies
        kinds: dict[tuple[torch.dtype, torch.device], _Kind] = {}
        for param in params:
            empty = _Kind([[] for _ in process_set.ranks])
            kind = kinds.setdefault((param.dtype, param.device), empty)
            kind.of[ownership.owner(param)].append(param)
        self._kinds = list(kinds.values())

    def suits(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether it was planned for these parameters."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def run(self) -> None:
        """Send the own parameters, and overwrite those of other owners with theirs.

        Raises:
            MismatchError: a rank has joined, or has other parameters.
            HvdliteError: the exchange failed.
        """
        if not self._kinds:
            return
        flats = [self._pack(kind) for kind in self._kinds]
        names = [f"{self._name}.{i}" for i in range(len(flats))]
        # Ranks with another number of copies get an error about the shape of this tensor.
        flats.append(flats[0].new_empty(0, self._copies))
        sent = Named(self._name, flats, [*names, f"{self._name}.copies"])
        sources = sent.read()
        specs = [spec(name, one, None) for name, one in zip(sent.names, sources, strict=True)]
        handle = start_allgather(self._name, specs, self._process_set, sources, blocking=True)
        handle.wait()
        received = take_received(handle, sources)
        for kind, one in zip(self._kinds, received, strict=False):
            self._check(kind, one.rows)
        with torch.no_grad():
            for kind, one in zip(self._kinds, received, strict=False):
                self._unpack(kind, one.tensor)

    def _pack(self, kind: _Kind) -> torch.Tensor:
        own = [_flat(param) for param in kind.of[self._own]]
        like = next(param for params in kind.of for param in params)
        return torch.cat(own) if own else _flat(like).new_empty(0)

    def _check(self, kind: _Kind, rows: Sequence[int]) -> None:
        for position, count in enumerate(rows):
            expected = kind.rows(position)
            if count == expected:
                continue
            rank = self._process_set.ranks[position]
            if count == 0:
                raise MismatchError(
                    f"'{self._name}': rank {rank} sent none of the {expected} elements of the "
                    "parameters that it alone updates; hvd.join() cannot be used with "
                    "ShardedOptimizer: give every rank the same number of steps"
                )
            raise MismatchError(
                f"'{self._name}': rank {rank} sent {count} elements of the parameters that it "
                f"updates, and this rank expected {expected}; make, freeze, thaw and add "
                "parameters alike on every rank"
            )

    def _unpack(self, kind: _Kind, gathered: torch.Tensor) -> None:
        begin = 0
        for position, params in enumerate(kind.of):
            for param in params:
                if position != self._own:
                    param.copy_(gathered[begin : begin + param.numel()].view(param.shape))
                begin += param.numel()


def _flat(param: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of the dimensions."""
    return param.detach().reshape(-1)
