"""What `DistributedOptimizer` adds to an optimizer for `virtual_size=`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdlite.errors import ArgumentError
from hvdlite.torch.virtual.steps import VirtualStep, VirtualSteps
from hvdlite.torch.wrapping import Wrapping

_KEY = "virtual_ranks"  # It has the place in the training, in a state_dict.


class VirtualStepping(Wrapping):
    """The methods for virtual ranks; the other ones do as without, where there are none."""

    _virtual: VirtualSteps | None = None

    def virtual_steps(
        self, loader: Any, epoch: int, model: torch.nn.Module, threads: int = 1
    ) -> Iterator[VirtualStep]:
        """Yield the steps of an epoch, each of which is a loop over batches of virtual ranks.

        A step of the world has one batch for each virtual rank, and a rank does those of its block
        of virtual ranks in turn. Before each batch the random generators (torch, NumPy, Python) are
        seeded for the step and the virtual rank, and buffers get the values with which the step
        began. When the loop over a step ends, gradients and floating-point buffers are means over
        all virtual ranks; other buffers are those of virtual rank 0. So parameters have the same
        bits with any number of ranks; see docs/modes/virtual_ranks.md.

        After `load_state_dict`, and when `hvd.elastic.run` calls its function again, epochs that
        are done yield nothing, and the one under way goes on at its step. In an elastic job the
        loop over a step gives batches again when a rank has died: the step begins anew.

        Args:
            loader: a `DataLoader` with batch_sampler=hvd.VirtualBatchSampler(...).
            epoch: the number of the epoch.
            model: the model, or a `torch.nn.ModuleList` of several; its buffers are averaged.
            threads: the number of torch's threads in each rank, on which the bits depend.

        Raises:
            ArgumentError: an argument cannot be used, or there are more ranks than virtual ranks.
            MismatchError: ranks give different arguments.
            HvdliteError: a step was left before its end, or torch has other threads.

        Example:
            >>> for epoch in range(10):
            ...     for step in optimizer.virtual_steps(loader, epoch, model):
            ...         optimizer.zero_grad()
            ...         for inputs, targets in step:
            ...             criterion(model(inputs), targets).backward()
            ...         optimizer.step()
        """
        if self._virtual is None:
            raise ArgumentError(
                "virtual_steps() needs the number of virtual ranks: pass virtual_size= to "
                "hvd.DistributedOptimizer"
            )
        return self._virtual.loop(loader, epoch, model, threads)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; with `virtual_size` also the epoch and the step, and the machine."""
        state: dict[str, Any] = super().state_dict()
        if self._virtual is not None:
            state[_KEY] = self._virtual.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; see `torch.optim.Optimizer.load_state_dict`.

        With `virtual_size` the training goes on where the state was saved.

        Raises:
            ArgumentError: the state was saved with another `virtual_size`.
        """
        if self._virtual is not None and _KEY in state_dict:
            self._virtual.load(state_dict[_KEY])
        super().load_state_dict(state_dict)
