"""`VirtualBatchSampler`: the batch of each virtual rank in each step, by random access."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.torch.virtual.order import Block, check_virtual_size, seed_all, seed_of

ORDER = "seed", "batch_size", "samples", "shuffle"


class VirtualBatchSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Gives each virtual rank its batch of each step, whichever rank carries it.

    Give it to a `DataLoader` as `batch_sampler=`, and loop over `Distributed.virtual_steps`, which
    tells it the epoch, the step and the virtual ranks of this rank. Each epoch has an order of its
    own. Samples at its end that do not fill a step are left out. The process that loads a batch
    seeds its random generators before, so that random transforms are the same with any number of
    ranks and of `num_workers`.

    Args:
        data: anything with a length, which stays the same.
        batch_size: the samples of one virtual rank in one step.
        virtual_size: the number of virtual ranks, a power of two, as of the optimizer.
        seed: decides the orders, and all random numbers of the training; a whole number, the same
            on all ranks.
        shuffle: whether each epoch has another order.

    Attributes:
        steps: the number of steps of an epoch. `batch_size`, `virtual_size` and `seed` are
            attributes, too.

    Raises:
        ArgumentError: an argument cannot be used, or `data` is too short for one step.

    Example:
        >>> sampler = hvd.VirtualBatchSampler(range(16), batch_size=2, virtual_size=4, seed=0)
        >>> sampler.steps
        2
        >>> sampler.batch(epoch=0, step=1, virtual_rank=3)
        [14, 7]
    """

    def __init__(
        self,
        data: Sized,
        *,
        batch_size: int,
        virtual_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.virtual_size = check_virtual_size(virtual_size)
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(
                    f"VirtualBatchSampler({name}={value!r}): give a whole number from {least} on"
                )
        self.batch_size, self.seed = batch_size, seed
        self._samples = len(data)
        self._shuffle = shuffle
        self.steps = self._samples // (batch_size * self.virtual_size)
        if self.steps == 0:
            raise ArgumentError(
                f"VirtualBatchSampler: a step takes {batch_size} x {virtual_size} samples, and "
                f"there are {self._samples}; use a smaller batch_size or virtual_size"
            )
        self._order: tuple[int, list[int]] | None = None  # It has the number of its epoch.
        # Only the loop over the steps may draw: it sets epoch, step and block for its iterator.
        self._next: tuple[int, int, Block] | None = None

    @property
    def order(self) -> dict[str, Any]:
        """What decides the order of the samples: `ORDER`."""
        values = self.seed, self.batch_size, self._samples, self._shuffle
        return dict(zip(ORDER, values, strict=True))

    def batch(self, epoch: int, step: int, virtual_rank: int) -> list[int]:
        """Return the indices of the samples of `virtual_rank` in a `step` of an `epoch`."""
        begin = (step * self.virtual_size + virtual_rank) * self.batch_size
        return self._order_of(epoch)[begin : begin + self.batch_size]

    def _order_of(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = [*range(self._samples)]
            if self._shuffle:
                generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
                order = torch.randperm(len(order), generator=generator, device="cpu").tolist()
            self._order = epoch, order
        return self._order[1]

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of this rank's virtual ranks; `virtual_steps` calls it."""
        if self._next is None:
            raise HvdliteError(
                "a VirtualBatchSampler is drawn from by optimizer.virtual_steps(loader, epoch, "
                "model) alone, which knows this rank's virtual ranks; loop over that, and give "
                "evaluation a DataLoader of its own"
            )
        return self._batches(*self._next)

    def _batches(self, epoch: int, first: int, block: Block) -> Iterator[list[int]]:
        for step in range(first, self.steps):
            for virtual_rank in range(block.first, block.first + block.size):
                seeds = (self.seed, epoch, step, virtual_rank, "data")
                yield _Indices(self.batch(epoch, step, virtual_rank), seeds)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, of all virtual ranks."""
        return self.steps * self.virtual_size


class _Indices(list[int]):
    """The indices of a batch; going through them seeds the generators of the process."""

    def __init__(self, indices: list[int], seeds: tuple[Any, ...]) -> None:
        super().__init__(indices)
        self._seeds = seeds

    def __iter__(self) -> Iterator[int]:
        seed_all(*self._seeds)
        return super().__iter__()

    def __reduce__(self) -> Any:
        return _Indices, (self[:], self._seeds)
