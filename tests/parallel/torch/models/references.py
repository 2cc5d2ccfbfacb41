"""What the tests of model parallelism share: one process to compare with, and its data."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 4
SAMPLES = 16  # of all replicas together

Loss = Callable[[nn.Module, int], torch.Tensor]


def descent(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def train(model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Do all steps; `loss_of(model, step)` is the loss whose gradients this rank computes."""
    optimizer = optimizer or descent(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def trained_alone(model: nn.Module, loss_of: Loss) -> nn.Module:
    """Return a copy of the model that was trained in this process alone."""
    alone = copy.deepcopy(model)
    train(alone, loss_of)
    return alone


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def distance(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((whole(mine) - whole(right)).abs().max()) for mine, right in pairs)


def numbers(step: int, *shape: int) -> torch.Tensor:
    """Return the inputs or targets of one step, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(shape)))


def inputs_and_targets(step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = numbers(step, SAMPLES, width)
    return x, torch.tanh(x.roll(1, dims=1) + numbers(step, SAMPLES, 1))
