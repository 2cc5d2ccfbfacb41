"""The mean of all ranks' changes in a round of local SGD, on its way.

An exchange sends when it is made, so that training goes on meanwhile, and `wait` returns the mean,
with the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import ops
from hvdlite.compression import cast_in_core
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import grouped


class MeanExchange:
    """One allreduce of all tensors."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        compression: Any,
        weight: float | None,
        process_set: ProcessSet,
    ) -> None:
        """Send contiguous tensors, to be overwritten; all ranks give a weight, or none does."""
        wire, self._compression = cast_in_core(compression, ops.Average)
        packed = [self._compression.compress(tensor) for tensor in tensors]
        self._contexts = [context for _, context in packed]
        reduction = Reduction(ops.Average, weight=weight, process_set=process_set, wire=wire)
        sent = grouped("allreduce", [one for one, _ in packed], name, process_set)
        self._handle = start_reducing(sent, reduction, in_place=True)

    def wait(self) -> list[torch.Tensor]:
        """Wait for the mean, and return it."""
        means = zip(self._handle.wait(), self._contexts, strict=True)
        return [self._compression.decompress(mean, context) for mean, context in means]
