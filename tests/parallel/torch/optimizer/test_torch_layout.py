"""Ranks that train different parameters get an error that names the parameter and the ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import (
    assert_close,
    assert_same_everywhere,
    backward,
    inputs,
    make,
    raises,
)

PRELOAD = ("torch._dynamo",)

pytestmark = pytest.mark.long

TINY = 1e-6  # MiB: every parameter is a bucket
WAYS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": TINY},
    "groups": {"num_groups": 2},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY},
    "overlap": {"overlap": True, "bucket_cap_mb": TINY},
    "fp16": {"compression": hvd.Compression.fp16},
    "Adasum": {"op": hvd.Adasum},
    "Adasum, many buckets": {"op": hvd.Adasum, "bucket_cap_mb": TINY},
}


def make_model(extra: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)]
    return nn.Sequential(*layers, *([nn.Linear(2, 2)] if extra else []))


def train_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def differs(text: str, step: Callable[[], None]) -> None:
    """Check the error, and that the world can still be used."""
    with raises(text):
        step()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size()


def others(rank: int) -> str:
    left = [str(one) for one in range(hvd.size()) if one != rank]
    return f"rank{'s' if len(left) > 1 else ''} {', '.join(left)}"


def scenario_frozen_on_one_rank_later(way: dict[str, Any]) -> None:
    model = make_model()
    optimizer = make(model, **way)
    first = model.get_parameter("0.weight")
    for _ in range(3):
        train_step(model, optimizer)
    first.requires_grad_(hvd.rank() != 0)
    text = f"the parameter '0.weight' is trained on {others(0)} and not on rank 0"
    differs(text, lambda: train_step(model, optimizer))


def scenario_frozen_and_thawed_on_all_ranks(way: dict[str, Any]) -> None:
    model = make_model()
    optimizer = make(model, **way)
    for frozen in (["0.weight"], [], ["2.bias", "0.bias"], []):
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        for _ in range(2):
            train_step(model, optimizer)
        assert_same_everywhere(model)


def scenario_a_group_is_added(way: dict[str, Any]) -> None:
    for ranks in (range(hvd.size()), [0]):
        torch.manual_seed(1)
        model, late = make_model(), nn.Linear(2, 1)
        hvd.broadcast_parameters(late.state_dict())
        optimizer = make(model, **way)

        def step(model: Any = model, late: Any = late, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            late(model(inputs())).square().sum().backward()
            optimizer.step()

        step()
        if hvd.rank() in ranks:
            optimizer.add_param_group({"params": list(late.parameters())})
        if ranks == [0]:
            differs(f"'parameter.1.0' is trained on rank 0 and not on {others(0)}", step)
        else:
            step()
            assert_same_everywhere(model)
            assert_same_everywhere(late)


def scenario_layers_change_between_two_backwards_of_a_step(way: dict[str, Any]) -> None:
    for change in ("add", "thaw", "freeze"):
        for paused in (False, True):
            model = make_model(extra=True)
            last = list(model[-1].parameters())
            first = [param for layer in model[:-1] for param in layer.parameters()]
            model[-1].requires_grad_(change != "thaw")
            passes = {} if paused else {"backward_passes_per_step": 2}
            sgd = torch.optim.SGD(first if change == "add" else [*first, *last], lr=0.1)
            optimizer = hvd.DistributedOptimizer(sgd, **way, **passes)
            for step in range(3):
                with optimizer.no_sync() if paused else contextlib.nullcontext():
                    backward(model)
                if step == 1 and change == "add":
                    optimizer.add_param_group({"params": last})
                elif step == 1:
                    model[-1].requires_grad_(change == "thaw")
                backward(model)
                optimizer.step()
                optimizer.zero_grad()
                assert_same_everywhere(model)


def check_thaw(
    members: hvd.ProcessSet, dtype: torch.dtype, scaler: torch.amp.GradScaler | None
) -> None:
    """Thaw a layer between the two backwards of a step, and compare with one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype))
    model[1].requires_grad_(False)
    alone = copy.deepcopy(model)
    optimizer = make(model, lr=0.01, process_set=members)
    reference = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step in range(3):
        for half in range(2):
            with optimizer.no_sync() if half == 0 else contextlib.nullcontext():
                loss = model(inputs().to(dtype)).abs().square().sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
            for rank in members.ranks:
                loss = alone(inputs(rank).to(dtype)).abs().square().sum()
                (loss / members.size()).backward()
            if step == 1:
                model[1].requires_grad_(True)
                alone[1].requires_grad_(True)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        if members.included():
            assert_close(list(model.parameters()), list(alone.parameters()))


def scenario_a_layer_thawed_between_two_backwards_counts_as_in_one_process() -> None:
    everywhere = hvd.global_process_set
    pair = hvd.add_process_set([0, 2]) if hvd.size() > 2 else everywhere
    check_thaw(everywhere, torch.complex64, None)
    check_thaw(everywhere, torch.float32, torch.amp.GradScaler("cpu", init_scale=64.0))
    check_thaw(pair, torch.float32, None)
    if hvd.size() > 2:
        hvd.remove_process_set(pair)


def scenario_a_group_with_gradients_is_added_after_their_reduction() -> None:
    model = make_model(extra=True)
    last = list(model[-1].parameters())
    first = [param for layer in model[:-1] for param in layer.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first, lr=0.1))
    backward(model)
    with pytest.raises(hvd.HvdliteError, match="that its parameters have would not be"):
        optimizer.add_param_group({"params": last})
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    optimizer.add_param_group({"params": last})
    model.zero_grad()
    for _ in range(2):
        train_step(model, optimizer)
        assert_same_everywhere(model)


def scenario_buckets_cut_otherwise() -> None:
    model = make_model()
    optimizer = make(model, bucket_cap_mb=TINY if hvd.rank() == 0 else 4)
    differs("put the same parameters into other buckets", lambda: train_step(model, optimizer))


def scenario_rows_are_under_way_on_one_rank() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 4, sparse=True), nn.Linear(4, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2 + hvd.rank()])).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    model.get_parameter("1.bias").requires_grad_(hvd.rank() == 0)
    differs("'1.bias' is trained on rank 0 and not on", step)


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init, forms=list(WAYS.values()))


test_layout = make_tests(body, sizes(3))
