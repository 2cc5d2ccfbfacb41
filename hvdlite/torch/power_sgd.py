"""What users say of PowerSGD; `hvdlite.torch.exchange.low_rank` does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvdlite.compression import Compressor
from hvdlite.errors import ArgumentError
from hvdlite.modes import Mode


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Sends gradients of matrices as two thin factors (Vogels et al., NeurIPS 2019).

    Only `hvd.DistributedOptimizer` and `hvd.ShardedOptimizer` with `stage=1` take it: a rank keeps
    what the factors lack, and adds it to its next gradient. See docs/modes/compression.md.

    Attributes:
        rank: the number of columns of the factors. More is more exact, and sends more.
        start: so many first steps are exact; at least one.
        least_gain: parameters whose gradient would not become smaller by this factor are exact.

    Raises:
        ArgumentError: a number is outside of its range.

    Example:
        >>> hvd.Compression.powersgd(rank=2, start=100)
        powersgd(rank=2, start=100, least_gain=2.0)
    """

    mode: ClassVar = Mode.POWERSGD

    rank: int = 4
    start: int = 1000
    least_gain: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("start", self.start)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(
                    f"Compression.powersgd({name}={value!r}): give a whole number, 1 or more"
                )
        if not 1.0 <= self.least_gain < math.inf:
            raise ArgumentError(
                f"Compression.powersgd(least_gain={self.least_gain!r}): give the factor by which a "
                "gradient must become smaller, 1 or more"
            )

    def __repr__(self) -> str:
        least_gain = float(self.least_gain)
        return f"powersgd(rank={self.rank}, start={self.start}, least_gain={least_gain})"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Raise an error, because nothing keeps the error of a single tensor."""
        raise ArgumentError(
            "Compression.powersgd is for the gradients of hvd.DistributedOptimizer, which keeps "
            "what a step does not send; take Compression.fp16 or Compression.bf16 here"
        )
