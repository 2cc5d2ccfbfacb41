"""Adds tensors up in a balanced binary tree, as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key")


class PartialSums(Generic[Key]):
    """Sums of 2^k consecutive sets of tensors, as a binary counter keeps them."""

    # So many sets have been added as the set bits of the number say: after 6 of them there are
    # sums of 4 and of 2. A tensor that one of two summands lacks counts as zeros there.

    def __init__(self) -> None:
        # Each has its k; the largest is first.
        self._sums: list[tuple[int, dict[Key, torch.Tensor]]] = []

    def add(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Add the next set, whose memory this object may use from now on."""
        level, total = 0, dict(tensors)
        while self._sums and self._sums[-1][0] == level:
            total = self._added(self._sums.pop()[1], total)
            level += 1
        self._sums.append((level, total))

    def take(self) -> dict[Key, torch.Tensor]:
        """Return the sums of all sets, whose number is a power of two."""
        ((_, total),) = self._sums
        self._sums = []
        return total

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _added(
        self, left: dict[Key, torch.Tensor], right: dict[Key, torch.Tensor]
    ) -> dict[Key, torch.Tensor]:
        both = [key for key in left if key in right]
        if both:
            torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
        alone = {key: one for key, one in left.items() if key not in right}
        alone |= {key: one for key, one in right.items() if key not in left}
        if alone:
            torch._foreach_add_([*alone.values()], 0.0)  # It makes 0.0 of -0.0, as zeros do.
        return left | alone
