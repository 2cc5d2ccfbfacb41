"""How a reducer reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.exchange.late import Late

NO_WEIGHT = (
    "ShardedOptimizer with stage=2 takes no weight, because its reducescatter makes plain averages "
    "and sums; use stage=1"
)

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
    bucket_view: bool = False  # gradient_as_bucket_view
    in_backward: bool = True  # reduce_in="backward"
    overlap: bool | None = None  # whether backward submits buckets before its end; None measures
    late: Late | None = None
    of_model: bool = False  # of a DistributedDataParallel, rather than of an optimizer
