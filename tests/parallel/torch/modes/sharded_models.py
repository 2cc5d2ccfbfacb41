"""A model with all kinds of parameters, and optimizers, for tests of `ShardedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd

Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


class Model(nn.Module):
    """Has a frozen layer, a layer that no loss uses, and a layer that every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 33)
        self.frozen, self.unused = nn.Linear(33, 33).requires_grad_(False), nn.Linear(3, 3)
        self.rare, self.last = nn.Linear(33, 33, dtype=torch.float64), nn.Linear(33, 2)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.frozen(self.hidden(self.table(x)).tanh())
        if rare:
            x = self.rare(x.double()).float() + x
        result: torch.Tensor = self.last(x)
        return result


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(11, (7,), generator=numbers)
    loss: torch.Tensor = model(x, rare=step % 2 == 1).square().mean()
    return loss


def groups_of(model: Model) -> list[dict[str, Any]]:
    """Two groups with options of their own."""
    first = [*model.table.parameters(), *model.frozen.parameters(), *model.rare.parameters()]
    last = [*model.hidden.parameters(), *model.unused.parameters(), *model.last.parameters()]
    return [{"params": first}, {"params": last, "lr": 0.03}]


def train_on(model: Model, optimizer: Any, steps: range, norm: float | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()


def assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), (name, (a - b).abs().max())


def sharded(make: Make, model: Model, **arguments: Any) -> Any:
    optimizer = make(groups_of(model))
    return hvd.ShardedOptimizer(optimizer, model.named_parameters(), **arguments)


def distributed(make: Make, model: Model, **arguments: Any) -> Any:
    optimizer = make(groups_of(model))
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)


def bytes_of(optimizer: Any) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))


def gradients_in(model: nn.Module) -> int:
    return sum(param.grad is not None for param in model.parameters())
