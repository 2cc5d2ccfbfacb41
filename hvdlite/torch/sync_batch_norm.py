"""Batch normalization with the moments of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.torch.collectives.allreduce import allreduce
from hvdlite.torch.late import may_be_behind
from hvdlite.torch.virtual.steps import in_virtual_step, refuse_with_virtual_size


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """torch's BatchNorm of any dimension, normalizing by the mean and variance over all ranks.

    Every sample counts the same, also if ranks have unequal batches, or one has none. Arguments,
    parameters, running moments and evaluation are those of `torch.nn.BatchNorm2d`; evaluation sends
    nothing. In training every rank calls its layers of this kind in the same order; each layer
    waits for the other ranks once in forward, and once in backward.

    Args:
        args: the arguments of `torch.nn.BatchNorm2d`; the number of channels comes first.
        process_set: only the batches of its members are combined; by default those of all ranks.
        options: the arguments of `torch.nn.BatchNorm2d`, by name.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 16, 3), hvd.SyncBatchNorm(16), torch.nn.ReLU())
    """

    process_set: ProcessSet = global_process_set

    def __init__(
        self, *args: Any, process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.process_set = process_set

    def _check_input_dim(self, inputs: torch.Tensor) -> None:
        if inputs.dim() < 2:
            raise ArgumentError(
                f"SyncBatchNorm takes samples of channels: at least 2 dimensions, not "
                f"{inputs.dim()}"
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize each channel of `inputs` [samples, channels, ...]."""
        if self.training and in_virtual_step():
            refuse_with_virtual_size("SyncBatchNorm")
        if self.process_set.size() == 1 or not self.training:
            result: torch.Tensor = super().forward(inputs)
            return result
        if may_be_behind():
            raise ArgumentError(
                "late= cannot be combined with SyncBatchNorm: the layer waits for every rank, and "
                "a rank that is behind computes nothing; use torch's BatchNorm, or a layer that "
                "normalizes each sample alone"
            )
        self._check_input_dim(inputs)
        narrow = inputs.dtype in (torch.float16, torch.bfloat16)
        wide = inputs.float() if narrow else inputs
        total, mean, variance = _moments(wide, self.process_set)
        if self.track_running_stats:
            self._note_moments(total, mean, variance)
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            scale = scale * self.weight.double()
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        outputs = (wide - mean.to(wide.dtype).view(shape)) * scale.to(wide.dtype).view(shape)
        if self.affine:
            outputs = outputs + self.bias.to(wide.dtype).view(shape)
        return outputs.to(inputs.dtype)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _note_moments(
        self, total: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # It means the average over all batches, as in torch.
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_set: ProcessSet = global_process_set
    ) -> nn.Module:
        """Replace every BatchNorm layer in a module; the replacements share its parameters.

        Args:
            module: a module that contains BatchNorm layers, or is one.
            process_set: the layers normalize over its members; by default over all ranks.

        Returns:
            `module`, changed in place; if it is itself a BatchNorm, its replacement.

        Raises:
            ArgumentError: a lazy BatchNorm does not know its number of channels yet.

        Example:
            >>> model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        """
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            if isinstance(module, nn.modules.lazy.LazyModuleMixin):
                raise ArgumentError(
                    f"a {type(module).__name__} does not know its number of channels before its "
                    "first forward: call the model once, and convert it after that"
                )
            replacement = cls.__new__(cls)
            replacement.__dict__.update(module.__dict__)
            replacement.process_set = process_set
            return replacement
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module


def _moments(
    inputs: torch.Tensor, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each channel's samples, mean and variance over all ranks; raise below two samples."""
    dims = [dim for dim in range(inputs.dim()) if dim != 1]
    count = inputs.numel() // max(inputs.shape[1], 1)
    n = max(count, 1)  # Sums over no samples are zeros.
    own_mean = inputs.sum(dims) / n
    shape = [1, -1] + [1] * (inputs.dim() - 2)
    own_variance = (inputs - own_mean.view(shape)).square().sum(dims) / n
    # Float64 is precise enough for the difference of squares: N = sum n, mean = sum(n mean) / N,
    # variance = sum(n (variance + mean^2)) / N - mean^2.
    own_mean, own_variance = own_mean.double(), own_variance.double()
    counts = torch.full_like(own_mean, count)
    own = torch.stack([counts, count * own_mean, count * (own_variance + own_mean.square())])
    sums = allreduce(own, op=ops.Sum, process_set=process_set)
    total = sums[0].detach()
    if bool((total < 2).any()):
        raise ArgumentError("SyncBatchNorm: all ranks together have fewer than 2 samples")
    mean = sums[1] / total
    variance = functional.relu(sums[2] / total - mean.square())
    return total, mean, variance
