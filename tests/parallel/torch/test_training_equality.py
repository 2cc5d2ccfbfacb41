"""Training on N ranks equals training of one process on the union of their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import RankResult, run_world

PRELOAD = ("torch._dynamo",)
STEPS = 20
BATCH = 24  # of all ranks together
FEATURES = 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
# Largest difference of a parameter, relative to the largest value in its tensor.
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
COMPRESSED = {"fp16": 2e-3, "bf16": 2e-2}

Case = tuple[str, torch.dtype, str, bool]  # optimizer, dtype, compression, unequal shares
CASES: list[Case] = [
    *((name, dtype, "none", uneven) for name in OPTIMIZERS for dtype in EXACT
      for uneven in (False, True)),
    *(("sgd", torch.float32, compression, False) for compression in COMPRESSED),
]  # fmt: skip


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
    return nn.Sequential(model, nn.Linear(8, 2)).to(dtype)


def batch_of(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.stack([inputs.sum(1).sin(), inputs.prod(1)], dim=1)
    return inputs.to(dtype), targets.to(dtype)


def share_of(rank: int, size: int, uneven: bool) -> slice:
    """Divide the batch; unevenly, rank r gets about r + 1 parts of it."""
    parts = [rank + 1 if uneven else 1 for rank in range(size)]
    bounds = [BATCH * sum(parts[:r]) // sum(parts) for r in range(size + 1)]
    return slice(bounds[rank], bounds[rank + 1])


def train(case: Case, rank: int, size: int, distributed: bool) -> list[torch.Tensor]:
    name, dtype, compression, uneven = case
    model = make_model(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if distributed:
        if rank != 0:
            for param in model.parameters():
                param.data.fill_(rank)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            bucket_cap_mb=0.0005,
        )
    mine = share_of(rank, size, uneven)
    for step in range(STEPS):
        inputs, targets = (part[mine] for part in batch_of(step, dtype))
        optimizer.zero_grad()
        if distributed and uneven:
            optimizer.weight = len(inputs)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def body() -> list[list[torch.Tensor]]:
    torch.set_num_threads(1)
    hvd.init()
    return [train(case, hvd.rank(), hvd.size(), distributed=True) for case in CASES]


@pytest.fixture(scope="module")
def alone() -> list[list[torch.Tensor]]:
    return [train(case, 0, 1, distributed=False) for case in CASES]


@pytest.fixture(scope="module", params=[1, 3])
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    return run_world(request.param, body)


def identifier(case: Case) -> str:
    name, dtype, compression, uneven = case
    shares = "unequal" if uneven else "equal"
    return f"{name}-{str(dtype).removeprefix('torch.')}-{compression}-{shares}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=[identifier(case) for case in CASES])
def test_parameters_equal_those_of_one_process(
    results: list[RankResult], alone: list[list[torch.Tensor]], number: int
) -> None:
    _, dtype, compression, _ = CASES[number]
    bound = COMPRESSED.get(compression, EXACT[dtype])
    first = results[0].value[number]
    for result in results[1:]:
        assert all(map(torch.equal, result.value[number], first)), "ranks differ"
    for ours, theirs in zip(first, alone[number], strict=True):
        difference = (ours - theirs).abs().max() / theirs.abs().max()
        assert difference < bound, f"{difference:.2e}"
