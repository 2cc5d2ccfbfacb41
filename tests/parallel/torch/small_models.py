"""Small models, and their expected gradients after reduction, for tests of the optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd
from hvdlite import basics


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def make(model: nn.Module, lr: float = 0.1, **arguments: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **arguments)


def inputs(rank: int | None = None) -> torch.Tensor:
    rank = hvd.rank() if rank is None else rank
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def mean_gradients(weights: list[float] | None = None) -> list[torch.Tensor]:
    """Compute the expected `gradients` after reduction, without communication."""
    model = make_model()
    weights = weights or [1.0] * hvd.size()
    for rank in range(hvd.size()):
        share = weights[rank] / sum(weights)
        (share * model(inputs(rank)).square().sum()).backward()
    return gradients(model)


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], rtol: float = 1e-5) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=rtol, atol=rtol), (a, b)


def assert_same_everywhere(model: nn.Module) -> None:
    mine = torch.cat([param.detach().flatten() for param in model.parameters()])
    for theirs in hvd.allgather(mine.unsqueeze(0)):
        assert torch.equal(theirs, mine)


def backward(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    loss = factor * model(inputs()).square().sum()
    loss.backward()
    return loss


def raises(text: str) -> pytest.RaisesExc[hvd.HvdliteError]:
    return pytest.raises(hvd.HvdliteError, match=text)


def unreduced(optimizer: Any) -> Any:
    """Expect the warning of a step that reduces what backward() should have."""
    return pytest.warns(hvd.UnreducedGradientsWarning)


def counters() -> dict[str, int]:
    return basics.engine().counters()


class Evaluating(torch.optim.SGD):
    """Changes parameters outside of its step, as schedule-free optimizers do."""

    def eval(self) -> None:
        """Do nothing here."""


class Branches(nn.Module):
    """Uses one of its layers, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.rare, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        return self.used(x) + (self.rare(x) if rare else 0)


class TwoHeads(nn.Module):
    """A trunk and two heads with separate losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x)
        return self.a(features).square().sum(), self.b(features).square().sum()


class Checkpointed(nn.Module):
    """Runs its layers in nested checkpoints, and has an unused layer."""

    def __init__(self, reentrant: bool, parts: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.unused = nn.Linear(2, 2)
        self.reentrant, self.parts = reentrant, parts

    def run(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            # The forward of a checkpoint, and of checkpoints nested in it, runs without gradients.
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            result: torch.Tensor = checkpoint(call, x, use_reentrant=self.reentrant)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(x).tanh()).square()

        if self.parts == "none":
            return inner(self.first(x))
        if self.parts == "end":
            return self.run(inner, self.first(x))
        if self.parts == "all":
            return self.run(lambda x: inner(self.first(x)), x)
        return self.run(lambda x: self.run(inner, self.first(x)), x)
