"""Adds tensors up in a balanced binary tree, as they come."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.virtual.tree_sums import Key, TreeSums


class PartialSums(TreeSums[Key]):
    """Sums of tensors."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _add_to(self, targets: list[Any], summands: list[Any] | float) -> None:
        torch._foreach_add_(targets, summands)
