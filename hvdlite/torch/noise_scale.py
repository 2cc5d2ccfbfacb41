"""`NoiseScale`: how large a batch pays, by the gradients of single ranks and their mean.

The gradient noise scale is that of McCandlish et al., "An Empirical Model of Large-Batch Training",
2018: the trace of the covariance of one sample's gradient, divided by the square of the mean
gradient. Batches that are much smaller average noise, and a larger batch trains in fewer steps;
batches that are much larger waste samples. Two batch sizes are needed for the estimate, and data
parallelism has both: that of a rank, and that of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import basics, operation_names, ops
from hvdlite.errors import ArgumentError
from hvdlite.modes import Mode, check_together
from hvdlite.torch.collectives.allreduce import allreduce
from hvdlite.torch.local import Local
from hvdlite.torch.optimizer import Distributed
from hvdlite.torch.optimizers.adasum import DistributedAdasum
from hvdlite.torch.optimizers.claims import owner_of
from hvdlite.torch.optimizers.reducer import GradientReducer


class NoiseScale:
    """Estimates the gradient noise scale while an optimizer trains.

    In one step of so many it reads the gradients twice more, and sends two numbers. The means of
    the two squares are smoothed, and not their ratio, whose mean would be wrong. When ranks of an
    elastic job meet at a boundary, they begin anew, because a rank that joins has measured nothing.

    Attributes:
        value: the estimate in samples, or NaN before the first one. Single steps are noisy: trust
            it after a hundred measured steps. It is infinite while the mean gradient cannot be told
            from zero.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> noise = hvd.NoiseScale(optimizer, batch_size=32)
        >>> # ... train ...
        >>> print(f"batches of {noise.value:.0f} samples, of all ranks together, are large enough")
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        batch_size: int,
        every: int = 10,
        decay: float = 0.99,
    ) -> None:
        """Begin to measure.

        Args:
            optimizer: a `DistributedOptimizer`, or the optimizer of a `DistributedDataParallel`. It
                averages gradients, each rank counts the same, and gradients are dense.
            batch_size: the samples of one rank in one step, the same on all ranks.
            every: steps from one measurement to the next.
            decay: what an older measurement keeps of its weight at each new one.

        Raises:
            ArgumentError: an argument cannot be used; the message says what to do.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError(f"NoiseScale(every={every!r}): give a number of steps from 1 on")
        if not (batch_size >= 1 and 0.0 <= decay < 1.0):
            raise ArgumentError(
                f"NoiseScale(batch_size={batch_size!r}, decay={decay!r}): batch_size is the number "
                "of samples of one rank, and decay at least 0 and less than 1"
            )
        reducer = _reducer_of(optimizer)
        adasum = isinstance(optimizer, DistributedAdasum)
        local = isinstance(optimizer, Local) and not isinstance(optimizer, Distributed)
        check_together({Mode.NOISE_SCALE: True, Mode.ADASUM: adasum, Mode.LOCAL_SGD: local})
        if reducer is None:
            raise ArgumentError(
                "NoiseScale compares the gradients of single ranks with their average: give it a "
                "DistributedOptimizer with op=hvd.Average"
            )
        modes = reducer.settings.modes()
        check_together({Mode.NOISE_SCALE: True, Mode.STAGE_2: reducer.divides, **modes})
        if reducer.buckets.observer is not None:
            raise ArgumentError("this optimizer has a NoiseScale already; close() that one first")
        self.value = math.nan
        self._batch_size = batch_size
        self._every = every
        self._decay = decay
        self._reducer = reducer
        self._process_set = reducer.settings.reduction.process_set
        self._own: list[torch.Tensor] = []  # They are the squares of this cycle's buckets.
        self._measured: list[torch.Tensor] | None = None  # They are the two squares of this step.
        self._noise = self._signal = 0.0
        self._restarts = operation_names.restarts()
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        reducer.buckets.observer = self

    def close(self) -> None:
        """Stop measuring; `value` stays."""
        self._hook.remove()
        self._reducer.buckets.observer = None

    # The reducer calls the methods below.

    @property
    def _due(self) -> bool:
        reducer = self._reducer
        several = reducer.takes_part and self._process_set.size() != 1
        return several and reducer.buckets.steps % self._every == 0

    def sends(self, params: Sequence[torch.Tensor]) -> None:
        """Look at the gradients of this rank, before they are reduced."""
        if basics.in_elastic_job() and self._restarts != operation_names.restarts():
            self._restarts = operation_names.restarts()
            self.value, self._noise, self._signal = math.nan, 0.0, 0.0
        if not self._due:
            return
        if self._reducer.buckets.reduction.weight is not None:
            drops = self._reducer.settings.weight is None
            weighed = Mode.MICRO_BATCHES if drops else Mode.WEIGHT
            check_together({Mode.NOISE_SCALE: True, weighed: True})
        self._own.append(_square(params))

    def received(self, params: Sequence[torch.Tensor]) -> None:
        """Look at the mean gradients; the step may change them later."""
        if self._own:
            self._measured = [sum(self._own, torch.zeros((), device="cpu")), _square(params)]

    def forget(self) -> None:
        """Forget the gradients of a cycle, which is over."""
        self._own = []

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        measured, self._measured = self._measured, None
        if measured is None:
            return
        own, mean = (float(one) for one in measured)
        sums = torch.tensor([own, 1.0], dtype=torch.float64, device="cpu")
        name = f"{self._reducer.name}.noise_scale"
        total, ranks = allreduce(
            sums, op=ops.Sum, name=name, process_set=self._process_set
        ).tolist()
        if ranks > 1 and math.isfinite(total) and math.isfinite(mean):
            self._note(total / ranks, mean, ranks)

    def _note(self, own: float, mean: float, ranks: float) -> None:
        """Take in the mean square of the gradients of `ranks` ranks, and their mean's square."""
        small, large = self._batch_size, self._batch_size * ranks
        signal = (large * mean - small * own) / (large - small)
        noise = (own - mean) / (1.0 / small - 1.0 / large)
        # Both begin at zero, which cancels in the ratio.
        self._signal = self._decay * self._signal + (1.0 - self._decay) * signal
        self._noise = self._decay * self._noise + (1.0 - self._decay) * noise
        self.value = max(self._noise, 0.0) / self._signal if self._signal > 0.0 else math.inf


def _reducer_of(optimizer: torch.optim.Optimizer) -> GradientReducer | None:
    if isinstance(optimizer, Distributed):
        return optimizer._reducer
    return owner_of(p for group in optimizer.param_groups for p in group["params"])


def _square(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of the gradients, in host memory or on their device, without waiting."""
    with torch.no_grad():
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for param in params:
            gradient = param.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise ArgumentError(
                    "NoiseScale needs dense gradients; make the embedding with sparse=False"
                )
            norm = torch.linalg.vector_norm(
                gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)
            )
            total = total.to(norm.device) + norm.double().square()
        return total
