"""How a reducer reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.collectives.submit import Reduction

Weight = float | Callable[[], float] | None


@dataclass
class Settings:
    """How gradients are reduced; see `DistributedOptimizer` for each."""

    reduction: Reduction
    compression: Any
    passes: int
    groups: int | Sequence[Sequence[torch.Tensor]]
    sparse_as_dense: bool
    cap_bytes: int | None
    weight: Weight
    bucket_view: bool = False  # Users call it gradient_as_bucket_view.
    overlap: bool | None = None  # Backward submits buckets before its end; None chooses.
    virtual_size: int | None = None  # The mean is over so many virtual ranks.
