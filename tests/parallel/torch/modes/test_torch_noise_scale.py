"""The gradient noise scale is that of one process that has the gradients of all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import make, make_model
from references.noise_scale import noise_scale

PRELOAD = ("torch._dynamo",)

pytestmark = pytest.mark.long


class Drawn(nn.Module):
    """Its gradient is the mean of the samples, so that the true noise scale is known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.weight.double(), self.bias])
        return (samples.double() @ both).mean()


def samples_of(step: int, rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 2 * width, generator=generator) + 0.25


def train(
    steps: int, width: int = 50, every: int = 1, decay: float = 0.9, **arguments: Any
) -> tuple[Any, Any]:
    model = Drawn(width)
    optimizer = make(model, **arguments)
    noise = hvd.NoiseScale(optimizer, batch_size=4, every=every, decay=decay)
    for step in range(steps):
        optimizer.zero_grad()
        model(samples_of(step, hvd.rank(), width)).backward()
        optimizer.step()
    return noise, optimizer


def expected(steps: range, width: int = 50) -> float:
    ranks = range(hvd.size())
    means = [torch.stack([samples_of(s, r, width).mean(0) for r in ranks]) for s in steps]
    return noise_scale(means, 4, 0.9)


def scenario_equals_the_reference() -> None:
    for every in (1, 3):
        noise, _ = train(20, every=every)
        assert noise.value == pytest.approx(expected(range(0, 20, every)), rel=1e-5)


def scenario_is_the_true_one_on_average() -> None:
    # The trace of the covariance is 2 * width; the square of the mean gradient 2 * width / 16.
    noise, _ = train(300, decay=0.999)
    assert 13 < noise.value < 19


def scenario_other_ways_to_reduce() -> None:
    for arguments in (
        {"reduce_in": "step"},
        {"gradient_as_bucket_view": True},
        {"num_groups": 2},
    ):
        noise, _ = train(4, **arguments)
        assert noise.value == pytest.approx(expected(range(4)), rel=1e-5), arguments
    noise, _ = train(4, compression=hvd.Compression.bf16)
    assert noise.value == pytest.approx(expected(range(4)), rel=0.1)


def scenario_accumulation() -> None:
    model = Drawn(50)
    optimizer = make(model, backward_passes_per_step=2)
    noise = hvd.NoiseScale(optimizer, batch_size=8, every=1, decay=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for half in (2 * step, 2 * step + 1):
            (model(samples_of(half, hvd.rank(), 50)) / 2).backward()
        optimizer.step()
    ranks = range(hvd.size())
    means = [
        torch.stack(
            [torch.cat([samples_of(2 * s + h, r, 50) for h in (0, 1)]).mean(0) for r in ranks]
        )
        for s in range(4)
    ]
    assert noise.value == pytest.approx(noise_scale(means, 8, 0.9), rel=1e-5)


def scenario_an_overflow_does_not_count() -> None:
    noise, optimizer = train(3)
    before = noise.value
    optimizer.zero_grad()
    first = optimizer.param_groups[0]["params"][0]
    first.grad = torch.full_like(first, math.inf if hvd.rank() == 0 else 1.0)
    optimizer.step()
    assert noise.value == before
    noise.close()
    assert math.isnan(hvd.NoiseScale(optimizer, batch_size=4).value)


def scenario_refusals() -> None:
    model = make_model()
    with pytest.raises(hvd.ArgumentError, match="with op=hvd.Average"):
        hvd.NoiseScale(torch.optim.SGD(model.parameters(), lr=0.1), batch_size=4)
    with pytest.raises(hvd.ArgumentError, match="cannot be combined with op=hvd.Sum"):
        hvd.NoiseScale(make(make_model(), op=hvd.Sum), batch_size=4)
    optimizer = make(model)
    for arguments in ({"batch_size": 0}, {"batch_size": 4, "decay": 1.0}):
        with pytest.raises(hvd.ArgumentError, match="number of samples of one rank"):
            hvd.NoiseScale(optimizer, **arguments)
    with pytest.raises(hvd.ArgumentError, match="a number of steps from 1 on"):
        hvd.NoiseScale(optimizer, batch_size=4, every=0)
    hvd.NoiseScale(optimizer, batch_size=4)
    with pytest.raises(hvd.ArgumentError, match="has a NoiseScale already"):
        hvd.NoiseScale(optimizer, batch_size=4)


def scenario_unequal_weights_are_refused() -> None:
    model = make_model()
    optimizer = make(model)
    optimizer.weight = 1.0 + hvd.rank()
    with pytest.raises(hvd.ArgumentError, match="ranks that count the same"):
        hvd.NoiseScale(optimizer, batch_size=4)


def scenario_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = make(table)
    hvd.NoiseScale(optimizer, batch_size=4)
    with pytest.raises(hvd.ArgumentError, match="needs dense gradients"):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def scenario_ranks_that_have_joined_are_left_out() -> None:
    model = Drawn(50)
    optimizer = make(model)
    noise = hvd.NoiseScale(optimizer, batch_size=4, every=1, decay=0.9)
    for step in range(2 if hvd.rank() == 0 else 5):
        optimizer.zero_grad()
        model(samples_of(step, hvd.rank(), 50)).backward()
        optimizer.step()
    hvd.join()
    ranks = [range(hvd.size())] * 2 + [range(1, hvd.size())] * 3
    if hvd.rank() == 0 or hvd.size() == 2:
        ranks = ranks[:2]  # one rank alone measures nothing
    means = [
        torch.stack([samples_of(step, rank, 50).mean(0) for rank in there])
        for step, there in enumerate(ranks)
    ]
    assert noise.value == pytest.approx(noise_scale(means, 4, 0.9), rel=1e-5)


def scenario_data_parallel() -> None:
    model = hvd.DistributedDataParallel(Drawn(50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = hvd.NoiseScale(optimizer, batch_size=4, every=1, decay=0.9)
    for step in range(4):
        optimizer.zero_grad()
        model(samples_of(step, hvd.rank(), 50)).backward()
        optimizer.step()
    assert noise.value == pytest.approx(expected(range(4)), rel=1e-5)


def scenario_one_rank_measures_nothing() -> None:
    alone = hvd.ProcessSet([0])
    hvd.add_process_set(alone)
    model = Drawn(50)
    optimizer = make(model, process_set=alone)
    noise = hvd.NoiseScale(optimizer, batch_size=4, every=1)
    if hvd.rank() == 0:
        model(samples_of(0, 0, 50)).backward()
        optimizer.step()
    assert math.isnan(noise.value)


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init)


test_noise_scale = make_tests(body, sizes(2, 3))
