"""Buffers of all ranks, names that libraries for Horovod read, and errors of common slips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvdlite
import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import raises

PRELOAD = ("torch._dynamo",)


def scenario_buffers_are_averaged() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).double())
    with torch.no_grad():
        for part in (model[1], model[2]):
            part.running_mean.fill_(hvd.rank())
            part.num_batches_tracked.fill_(hvd.rank())
            part.weight.fill_(hvd.rank())
    hvd.allreduce_buffers(model)
    for part in (model[1], model[2]):
        assert torch.equal(part.running_mean, torch.full_like(part.running_mean, 0.5))
        assert torch.equal(part.running_var, torch.ones_like(part.running_var))
        assert part.num_batches_tracked == hvd.rank()
        assert bool((part.weight == hvd.rank()).all())
    hvd.allreduce_buffers(nn.Linear(3, 4))
    if hvd.rank() == 0:
        hvd.allreduce_buffers(nn.Linear(3, 4))  # sends nothing
    with raises("takes a model, not a OrderedDict"):
        bad: Any = model.state_dict()
        hvd.allreduce_buffers(bad)


def scenario_mpi_ops() -> None:
    ops = {"SUM": hvd.mpi_ops.Sum, "AVERAGE": hvd.mpi_ops.Average, "ADASUM": hvd.mpi_ops.Adasum}
    assert list(ops.values()) == [hvd.Sum, hvd.Average, hvd.Adasum]
    assert hvd.mpi_ops.allreduce(torch.ones(1), op=ops["SUM"]) == 2


def scenario_slips() -> None:
    model: Any = nn.Linear(3, 2)
    with raises("takes an optimizer, not a Linear: pass an optimizer"):
        hvd.DistributedOptimizer(model)
    with raises("pass model.state_dict()"):
        hvd.broadcast_parameters(model)
    number: Any = 3.0
    with raises("is a float, not a tensor.* It is 3.0"):
        hvd.allreduce(number)
    whole: Any = hvdlite
    with pytest.raises(AttributeError, match="use import hvdlite.torch as hvd"):
        whole.init()
    with pytest.raises(AttributeError, match="'__wrapped__'$"):
        assert whole.__wrapped__


def body() -> dict[str, str]:
    return run_all(globals())


test_entry_points = make_tests(body, sizes(2))
