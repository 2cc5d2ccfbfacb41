"""A model, its training, and its simulation in one process, for tests of `LocalSGD`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from references import local_sgd
from references.sum_tree import reduce_by_tree


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(8, 3, generator=generator)
    loss: torch.Tensor = (model(inputs).sum(1) - inputs.sum(1).sin()).square().mean()
    return loss


def take_steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


def engine_mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum by the tree, as the engine does."""
    return reduce_by_tree(tensors, torch.add) / len(tensors)


def simulate(
    make: Callable[[Any], Any], steps: int, mean: Any = engine_mean, **arguments: Any
) -> list[list[torch.Tensor]]:
    """Return the parameters of each replica."""
    models = [make_model() for _ in range(hvd.size())]
    optimizers = [make(model.parameters()) for model in models]
    local_sgd.train(models, optimizers, loss_of, steps, mean, **arguments)
    return [[param.detach() for param in model.parameters()] for model in models]


def assert_equal(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.equal(ours, theirs), (ours - theirs).abs().max()
