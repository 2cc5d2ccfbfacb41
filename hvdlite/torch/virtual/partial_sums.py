"""Adds tensors up in a balanced binary tree, as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch

Key = TypeVar("Key")


class TreeSums(ABC, Generic[Key]):
    """Sums of 2^k consecutive sets of arrays, as a binary counter keeps them."""

    # So many sets have been added as the set bits of the number say: after 6 of them there are
    # sums of 4 and of 2. An array that one of two summands lacks counts as zeros there.

    def __init__(self) -> None:
        self._sums: list[tuple[int, dict[Key, Any]]] = []  # Each has its k; the largest is first.

    def add(self, arrays: Mapping[Key, Any]) -> None:
        """Add the next set, whose memory this object may use from now on."""
        level, total = 0, dict(arrays)
        while self._sums and self._sums[-1][0] == level:
            total = self._added(self._sums.pop()[1], total)
            level += 1
        self._sums.append((level, total))

    def take(self) -> dict[Key, Any]:
        """Return the sums of all sets, whose number is a power of two."""
        ((_, total),) = self._sums
        self._sums = []
        return total

    def _added(self, left: dict[Key, Any], right: dict[Key, Any]) -> dict[Key, Any]:
        both = [key for key in left if key in right]
        if both:
            self._add_to([left[key] for key in both], [right[key] for key in both])
        alone = {key: array for key, array in left.items() if key not in right}
        alone |= {key: array for key, array in right.items() if key not in left}
        if alone:
            self._add_to([*alone.values()], 0.0)  # It makes 0.0 of -0.0, as zeros do.
        return left | alone

    @abstractmethod
    def _add_to(self, targets: list[Any], summands: list[Any] | float) -> None:
        """Add to each target, in place, its summand or the number."""


class PartialSums(TreeSums[Key]):
    """Sums of tensors."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _add_to(self, targets: list[Any], summands: list[Any] | float) -> None:
        torch._foreach_add_(targets, summands)
