"""`VirtualBatches`: the batch of each virtual rank in each step, of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.virtual.batch_order import BatchOrder


class VirtualBatches:
    """Gives each virtual rank its batch of each step, whichever rank carries it.

    Give it to `hvd.virtual_steps`. Each epoch has an order of its own. Samples at its end that do
    not fill a step are left out.

    Attributes:
        batch_size: the samples of one virtual rank in one step.
        virtual_size: the number of virtual ranks.
        seed: decides the orders, and all random numbers of the training.
        steps: the number of steps of an epoch.

    Example:
        >>> import numpy as np
        >>> batches = hvd.VirtualBatches(np.arange(16), batch_size=2, virtual_size=4, shuffle=False)
        >>> batches.steps
        2
        >>> batches.batch(epoch=0, step=1, virtual_rank=3)
        (array([14, 15]),)
    """

    def __init__(
        self,
        *arrays: Any,
        batch_size: int,
        virtual_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Divide the samples among steps and virtual ranks.

        Args:
            arrays: all samples, the same on all ranks: inputs, targets and so on. Each is a NumPy
                array, or another object that has a length and gives rows for a list of indices.
            batch_size: the samples of one virtual rank in one step.
            virtual_size: the number of virtual ranks, a power of two.
            seed: a whole number, the same on all ranks.
            shuffle: whether each epoch has another order.

        Raises:
            ArgumentError: an argument cannot be used, arrays have different lengths, or there are
                too few samples for one step.
        """
        lengths = [len(array) for array in arrays]
        if not lengths or len({*lengths}) > 1:
            raise ArgumentError(
                f"VirtualBatches takes one or more arrays of the same length, not of {lengths}"
            )
        self._arrays = arrays
        self._order = BatchOrder(
            "VirtualBatches", lengths[0], batch_size, virtual_size, seed,
            _permuted if shuffle else None,
        )  # fmt: skip
        self.batch_size, self.seed = batch_size, seed
        self.virtual_size, self.steps = self._order.virtual_size, self._order.steps

    def batch(self, epoch: int, step: int, virtual_rank: int) -> tuple[Any, ...]:
        """Return the rows of one virtual rank in one step, of each array.

        Args:
            epoch: the number of the epoch.
            step: the number of the step in the epoch.
            virtual_rank: the number of the virtual rank.
        """
        indices = self._order.batch(epoch, step, virtual_rank)
        return tuple(array[indices] for array in self._arrays)


def _permuted(seed: int, samples: int) -> list[int]:
    order: list[int] = np.random.Generator(np.random.PCG64(seed)).permutation(samples).tolist()
    return order
