"""SyncBatchNorm equals one process on the samples of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)
COUNTS = [4, 0, 3]  # samples by rank: different numbers, and none


def own_samples() -> slice:
    begin = sum(COUNTS[: hvd.rank()])
    return slice(begin, begin + COUNTS[hvd.rank()])


def samples(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(3)
    total = sum(COUNTS[: hvd.size()])
    return (100 + torch.randn(total, *shape, dtype=torch.float64)).to(dtype)


def outcome(layer: nn.Module, inputs: torch.Tensor, factors: torch.Tensor) -> dict[str, Any]:
    """Run forward and backward; return outputs, gradients and running moments."""
    inputs = inputs.clone().requires_grad_()
    outputs = layer(inputs)
    (outputs * factors).sum().backward()
    found = {"outputs": outputs.detach(), "inputs": inputs.grad}
    found |= {name: param.grad for name, param in layer.named_parameters()}
    return found | dict(layer.named_buffers())


def compare(ours: nn.Module, theirs: nn.Module, *shape: int) -> None:
    inputs, factors = samples(*shape), torch.sin(samples(*shape))
    own = own_samples()
    whole = outcome(theirs, inputs, factors)
    for name, value in outcome(ours, inputs[own], factors[own]).items():
        expected = whole[name]
        if name in ("outputs", "inputs"):
            expected = expected[own]
        elif name in ("weight", "bias"):
            value = hvd.allreduce(value, op=hvd.Sum)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9, msg=name)


def scenario_every_dimension() -> None:
    compare(hvd.SyncBatchNorm(5).double(), nn.BatchNorm1d(5).double(), 5)
    compare(hvd.SyncBatchNorm(5).double(), nn.BatchNorm1d(5).double(), 5, 4)
    compare(hvd.SyncBatchNorm(3).double(), nn.BatchNorm2d(3).double(), 3, 4, 2)
    compare(hvd.SyncBatchNorm(2).double(), nn.BatchNorm3d(2).double(), 2, 3, 2, 2)


def scenario_arguments() -> None:
    for options in (
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.1},
    ):
        compare(hvd.SyncBatchNorm(5, **options).double(), nn.BatchNorm1d(5, **options).double(), 5)


def scenario_running_moments_over_several_batches() -> None:
    ours, theirs = hvd.SyncBatchNorm(5).double(), nn.BatchNorm1d(5).double()
    for _ in range(3):
        compare(ours, theirs, 5)
        for layer in (ours, theirs):
            layer.zero_grad()
    ours.eval()
    theirs.eval()
    inputs = samples(5)
    torch.testing.assert_close(ours(inputs), theirs(inputs))


def scenario_narrow_types() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        layer = hvd.SyncBatchNorm(5).to(dtype)
        inputs = samples(5, dtype=dtype)
        ours = layer(inputs[own_samples()])
        assert ours.dtype == dtype
        theirs = nn.BatchNorm1d(5)(inputs.float())[own_samples()]
        torch.testing.assert_close(ours.float(), theirs, rtol=0.1, atol=0.1)


def scenario_conversion_keeps_parameters() -> None:
    layer = nn.BatchNorm2d(3)
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert converted.weight is layer.weight and converted.eps == layer.eps
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(converted) is converted


def scenario_misuse_says_what_to_do() -> None:
    with pytest.raises(hvd.ArgumentError, match="at least 2 dimensions, not 1"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    one = torch.ones(1 if hvd.rank() == 0 else 0, 3)
    with pytest.raises(hvd.ArgumentError, match="fewer than 2 samples"):
        hvd.SyncBatchNorm(3)(one)


def scenario_evaluation_sends_nothing() -> None:
    for arguments in ({"track_running_stats": False}, {}, {"momentum": None}):
        plain = nn.BatchNorm1d(3, **arguments).eval()
        layer = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).eval()
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(hvd.rank()))
        if hvd.rank() == 0:
            assert torch.equal(layer(inputs), plain(inputs))
    hvd.barrier()


def scenario_a_lazy_layer_says_what_to_do() -> None:
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(hvd.ArgumentError, match="call the model once, and convert it after that"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(lazy)
    lazy(torch.randn(4, 3))
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(lazy)[0], hvd.SyncBatchNorm)


def scenarios() -> dict[str, str]:
    return run_all(globals())


test_sync_batch_norm = make_tests(scenarios, sizes(2, 3))
