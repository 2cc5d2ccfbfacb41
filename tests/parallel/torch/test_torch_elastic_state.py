"""TorchState over several ranks: rank 0's state for all, commits, messages, random generators."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from hvdlite.elastic.state import ADDED, REMOVED
from hvdlite.errors import HostsUpdatedInterrupt
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)


def make_training(wraps: bool, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9
    )
    for _ in range(steps):
        step(model, optimizer)
    if wraps:
        optimizer = hvd.DistributedOptimizer(optimizer)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 4) * torch.arange(4.0)).square().sum().backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    moments = [
        None if one.get("momentum_buffer") is None else one["momentum_buffer"].tolist()
        for one in optimizer.state_dict()["state"].values()
    ]
    values = [value.tolist() for value in model.state_dict().values()]
    return [values, moments, optimizer.param_groups[0]["lr"]]


def equal_everywhere(value: Any) -> bool:
    return all(one == value for one in hvd.allgather_object(value))


def scenario_all_get_the_state_of_rank_0() -> None:
    for wraps in (False, True):
        # Rank 0 trains already, and the other ranks join it.
        joins = hvd.rank() > 0
        model, optimizer, scheduler = make_training(wraps, steps=0 if joins else 1)
        scheduler.last_epoch = 0 if joins else 1
        state = hvd.elastic.TorchState(
            model, optimizer, scheduler=scheduler, epoch=hvd.rank() + 3, done=[hvd.rank()]
        )
        state.sync()
        assert equal_everywhere(everything(model, optimizer))
        assert len(optimizer.state) == 6
        assert (state.epoch, state.done, scheduler.last_epoch) == (3, [0], 1)
        step(model, optimizer)
        assert equal_everywhere(everything(model, optimizer))


def scenario_one_ranks_message_interrupts_all() -> None:
    state = hvd.elastic.TorchState(epoch=0)
    for version, (informed, update) in enumerate([(0, ADDED), (hvd.size() - 1, REMOVED)], start=1):
        state.commit()
        if hvd.rank() == informed:
            state.on_hosts_updated(version, update)
        with pytest.raises(HostsUpdatedInterrupt) as interrupt:
            state.commit()
        assert interrupt.value.skip_sync is (update == REMOVED)
        state.on_hosts_updated(version, update)  # too late on the other ranks
    state.commit()


def scenario_generators_of_ranks_that_join() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item()]

    for equal in (True, False):
        seed = 5 if equal else hvd.rank()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        state = hvd.elastic.TorchState(rng=True)
        state.sync()
        first = hvd.allgather_object(draw())
        assert (len({tuple(one) for one in first}) == 1) is equal
        state.commit()
        expected = draw()
        state.restore()
        if hvd.rank() == hvd.size() - 1:
            random.seed(99)
            torch.manual_seed(0)  # rank 0's own stream
            state = hvd.elastic.TorchState(rng=True)
        state.sync()
        drawn = hvd.allgather_object(draw())
        assert hvd.rank() == hvd.size() - 1 or drawn[hvd.rank()] == expected
        assert (len({one[0] for one in drawn}) == 1) is equal
        assert (len({one[2] for one in drawn}) == 1) is equal


def accumulate(optimizer: Any, weight: nn.Parameter, in_no_sync: bool) -> None:
    with optimizer.no_sync() if in_no_sync else contextlib.nullcontext():
        weight.sum().backward()


def scenario_accumulated_gradients_end_at_a_boundary() -> None:
    for in_no_sync in (False, True):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=1 if in_no_sync else 2
        )
        state = hvd.elastic.TorchState(optimizer=optimizer)
        for cross_boundary in (state.on_reset, state.reset, state.restore):
            accumulate(optimizer, weight, in_no_sync)
            cross_boundary()
            if cross_boundary == state.restore:
                state.on_reset()
            accumulate(optimizer, weight, in_no_sync)
            weight.sum().backward()
            optimizer.step()
            assert weight.tolist() == [-2.0, -2.0]
            state.reset()  # leaves gradients alone that a step has used
            assert weight.grad is not None
            optimizer.zero_grad()
            nn.init.zeros_(weight)


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init)


test_torch_elastic_state = make_tests(body, sizes(3))


def sync_of_different_models() -> None:
    hvd.init()
    hvd.elastic.TorchState(nn.Linear(4, 2 + hvd.rank())).sync()


def test_rank_with_another_model_names_the_difference_and_ends() -> None:
    first, second = run_world(2, sync_of_different_models, expect_failure=True)
    assert "'model: weight' is float32 [3, 4] on rank 1 and float32 [2, 4] on rank 0" in (
        second.stderr
    )
    assert "rank 1 raised MismatchError: rank 1 cannot receive the state" in first.stderr
