"""The gradient noise scale of recorded gradients, in one process (McCandlish et al., 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def noise_scale(steps: Sequence[torch.Tensor], batch_size: int, decay: float) -> float:
    """Return the estimate after the last step; `decay` is that of the two means."""
    # For each measured step, `steps` has the gradients of the ranks [ranks, elements]. `batch_size`
    # counts the samples of one rank.
    noises, signals, weights = [], [], []
    for age, gradients in enumerate(reversed(steps)):
        small, large = batch_size, batch_size * len(gradients)
        wide = gradients.double()
        own = wide.square().sum(1).mean()
        mean = wide.mean(0).square().sum()
        signals.append((large * mean - small * own) / (large - small))
        noises.append((own - mean) / (1 / small - 1 / large))
        weights.append(decay**age)
    weight = torch.tensor(weights, dtype=torch.float64)
    return float((weight * torch.stack(noises)).sum() / (weight * torch.stack(signals)).sum())
