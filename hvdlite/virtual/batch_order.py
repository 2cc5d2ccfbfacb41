"""Which samples each virtual rank has in each step, by random access."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.errors import ArgumentError
from hvdlite.virtual.blocks import check_virtual_size
from hvdlite.virtual.generators import seed_of


class BatchOrder:
    """The samples of all epochs, divided among steps and virtual ranks."""

    def __init__(
        self,
        caller: str,
        samples: int,
        batch_size: int,
        virtual_size: int,
        seed: int,
        permute: Callable[[int, int], list[int]] | None,
    ) -> None:
        """Check the user's arguments; `permute` gets a seed and a number of samples."""
        self.virtual_size = check_virtual_size(virtual_size)
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(
                    f"{caller}({name}={value!r}): give a whole number from {least} on"
                )
        self.batch_size, self.seed = batch_size, seed
        self._samples = samples
        self._permute = permute
        self.steps = samples // (batch_size * self.virtual_size)
        if self.steps == 0:
            raise ArgumentError(
                f"{caller}: a step takes {batch_size} x {virtual_size} samples, and "
                f"there are {samples}; use a smaller batch_size or virtual_size"
            )
        self._order: tuple[int, list[int]] | None = None  # It has the number of its epoch.

    def batch(self, epoch: int, step: int, virtual_rank: int) -> list[int]:
        """Return the indices of the samples of one virtual rank in one step."""
        begin = (step * self.virtual_size + virtual_rank) * self.batch_size
        return self._order_of(epoch)[begin : begin + self.batch_size]

    def _order_of(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = [*range(self._samples)]
            if self._permute is not None:
                order = self._permute(seed_of(self.seed, epoch), self._samples)
            self._order = epoch, order
        return self._order[1]
