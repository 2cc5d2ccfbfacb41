"""How a reducer reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.modes import Mode
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.compression import Compression
from hvdlite.torch.exchange.late import Late

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
    late: Late | None = None
    virtual_size: int | None = None  # The mean is over so many virtual ranks.

    def modes(self) -> dict[Mode, bool]:
        """Return the modes that are chosen, for `check_together`."""
        virtual = self.virtual_size is not None
        return modes_of(
            op=ops.Average if virtual else self.reduction.op,
            compression=self.compression,
            weight=self.weight,
            gradient_as_bucket_view=self.bucket_view,
            late=self.late,
            backward_passes_per_step=self.passes,
            virtual_size=self.virtual_size,
        )


def modes_of(
    *,
    op: int = ops.Average,
    compression: Any = Compression.none,
    weight: Weight = None,
    gradient_as_bucket_view: bool = False,
    late: Any = None,
    backward_passes_per_step: int = 1,
    virtual_size: int | None = None,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **_: Any,
) -> dict[Mode, bool]:
    """Return the modes that arguments of `DistributedOptimizer` choose, for `check_together`."""
    return {
        **ops.modes_of_op(op),
        Mode.PASSES: ops.check_passes(backward_passes_per_step) > 1,
        Mode.WEIGHT: weight is not None,
        Mode.BUCKET_VIEW: gradient_as_bucket_view,
        Mode.COMPRESSION: compression is not Compression.none,
        Mode.LATE: late is not None,
        Mode.VIRTUAL: virtual_size is not None,
        Mode.PREDIVIDE: gradient_predivide_factor != 1.0,
        Mode.PROCESS_SET: process_set is not global_process_set,
        Mode.ELASTIC: basics.in_elastic_job(),
    }
