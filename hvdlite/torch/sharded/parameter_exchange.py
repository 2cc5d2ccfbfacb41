"""Sends updated parameters from their owners to all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.submit import Submission, start_broadcast
from hvdlite.torch.collectives.tensors import check, lies_otherwise, spec
from hvdlite.torch.sharded.ownership import Ownership


class ParameterExchange:
    """Gives every rank the parameters that others have updated."""

    # Each owner broadcasts its parameters, in place and fused; all broadcasts are under way
    # together. An allgather would need new memory for all parameters and two copies, which take
    # longer than the transfer does.

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        ownership: Ownership,
        process_set: ProcessSet,
    ) -> None:
        """Plan it with owners by position in the process set, of which this rank is a member."""
        self.params = list(params)  # The order is the same on all ranks; each has an owner.
        self._name = name
        self._process_set = process_set
        # This has the positions by owner.
        self._of: list[list[int]] = [[] for _ in process_set.ranks]
        for position, param in enumerate(params):
            self._of[ownership.owner(param)].append(position)

    def suits(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether it was planned for these parameters."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def run(self, update: Callable[[], None]) -> None:
        """Update, and exchange; raise a MismatchError if a rank has joined or has other ones."""
        update()
        if not self.params:
            return
        memories = [self._memory(position) for position in range(len(self.params))]
        started = [self._start(owner, memories) for owner in range(len(self._of))]
        failures: list[HvdliteError] = []
        for handle in started:
            try:
                handle.wait()
            except HvdliteError as error:
                failures.append(error)
        if failures and isinstance(failures[0], ArgumentError | MismatchError):
            raise MismatchError(
                f"{failures[0]}. With ShardedOptimizer make, freeze, thaw and add parameters alike "
                "on every rank, and give every rank as many steps, without hvd.join()"
            ) from failures[0]
        if failures:
            raise failures[0]
        with torch.no_grad():
            for param, memory in zip(self.params, memories, strict=True):
                if memory.data_ptr() != param.data_ptr():
                    param.copy_(memory)

    def _memory(self, position: int) -> torch.Tensor:
        """Return the parameter as memory that the core may overwrite: its own, or a copy."""
        param = self.params[position]
        check(param, f"{self._name}.{position}")
        values = param.detach()
        if lies_otherwise(values):
            values = values.resolve_conj().resolve_neg()
        return values.contiguous()

    def _start(self, owner: int, memories: Sequence[torch.Tensor]) -> Submission:
        name = f"{self._name}.of.{owner}"
        specs = [
            spec(f"{self._name}.{position}", memories[position], memories[position])
            for position in self._of[owner]
        ]
        # Of an owner without parameters this travels alone, so that a rank for which it has some
        # gets an error.
        end = memories[0].new_empty(0)
        specs.append(spec(f"{self._name}.end", end, end))
        root = self._process_set.ranks[owner]
        keep = (memories, end)
        return start_broadcast(name, specs, root, self._process_set, keep, blocking=True)
