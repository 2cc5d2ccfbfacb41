"""Training on one process with the batches of all ranks: what `ShardedOptimizer` has to equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor],
    ranks: int,
    steps: Iterable[int],
    norm: float | None = None,
) -> None:
    """Step with the mean of the ranks' gradients, clipped to `norm` if it is given."""
    # The model is trained in place. `optimizer` is a plain one of all its parameters, and `loss_of`
    # returns the loss of a rank's batch in a step.
    for step in steps:
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            for param in model.parameters():
                if param.grad is not None:
                    sums[param] = sums[param] + param.grad if param in sums else param.grad
        for param in model.parameters():
            param.grad = sums[param] / ranks if param in sums else None
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
