"""broadcast_parameters, broadcast_optimizer_state and the objects."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from hvdlite.rendezvous import environment
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"lr": torch.tensor(0.01), "amsgrad": True},
}


def optimizer_classes() -> Iterator[type[torch.optim.Optimizer]]:
    """List every optimizer of the installed torch."""
    for value in vars(torch.optim).values():
        if (
            inspect.isclass(value)
            and issubclass(value, torch.optim.Optimizer)
            and value is not torch.optim.Optimizer
        ):
            yield value


def make_model() -> nn.Module:
    torch.manual_seed(hvd.rank())
    return nn.Linear(3, 2, bias=False).double()


def make(kind: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    return kind(model.parameters(), **OPTIONS.get(kind.__name__, {}))


def step(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> None:
    sparse = isinstance(optimizer, torch.optim.SparseAdam)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        torch.manual_seed(seed)
        loss = model(torch.randn(4, 3, dtype=torch.float64)).square().sum()
        loss.backward()
        for param in model.parameters():
            if sparse and param.grad is not None:
                param.grad = param.grad.to_sparse()
        return loss

    optimizer.step(closure)


def everything_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Flatten a state for comparison: tensors become their dtype and values."""

    def flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield path, (str(value.dtype), value.tolist())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                yield from flatten(f"{path}.{key}", value[key])
        elif isinstance(value, list | tuple):
            yield path, (type(value).__name__, len(value))
            for i, item in enumerate(value):
                yield from flatten(f"{path}.{i}", item)
        else:
            yield path, value

    return list(flatten("", optimizer.state_dict()))


def assert_equal_everywhere(value: Any) -> None:
    every = hvd.allgather_object(value)
    assert all(each == every[0] for each in every), every


def scenario_state_of_every_optimizer() -> None:
    kinds = list(optimizer_classes())
    assert len(kinds) > 12
    for kind in kinds:
        for owners in ([0], [hvd.size() - 1], range(hvd.size()), []):
            model = make_model()
            optimizer = make(kind, model)
            if hvd.rank() in owners:
                for i in range(1 + hvd.rank()):
                    step(optimizer, model, seed=i)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            if kind is not torch.optim.Adagrad:  # which creates its state in its constructor
                assert (not optimizer.state) == (0 not in owners), kind
            assert_equal_everywhere(everything_of(optimizer))
            for i in range(2):
                step(optimizer, model, seed=i)
            assert_equal_everywhere([param.tolist() for param in model.parameters()])
            assert_equal_everywhere(everything_of(optimizer))


def scenario_gradients_before_the_first_step() -> None:
    for momentum, wraps in itertools.product((0.0, 0.9), (False, True)):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        if wraps:
            optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        assert all(param.grad is None for param in model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(environment, "imitates_horovod", lambda: True)
            hvd.broadcast_optimizer_state(optimizer)
            assert all((param.grad == 0).all() for param in model.parameters())
            step(optimizer, model, seed=0)
            before = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
            hvd.broadcast_optimizer_state(optimizer)
            for param, gradient in zip(model.parameters(), before, strict=True):
                zeroed = momentum == 0  # there is no state after a step, either
                assert torch.equal(param.grad, 0 * gradient if zeroed else gradient)


def scenario_options_of_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.1 + hvd.rank(), "betas": (0.5, 0.9)},
            {"params": model[1].parameters(), "foreach": None if hvd.rank() == 0 else False},
        ]
    )
    wrapped = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0, model=model)
    assert wrapped.param_groups[0]["lr"] == 0.1
    assert wrapped.param_groups[0]["betas"] == (0.5, 0.9)
    assert wrapped.param_groups[1]["foreach"] is None
    assert wrapped.param_groups[0]["params"][0] is model[0].weight


def scenario_state_that_is_no_tensor() -> None:
    model = make_model()
    optimizer = make(torch.optim.SGD, model)
    (param,) = model.parameters()
    if hvd.rank() == 0:
        optimizer.state[param] = {
            "note": "text",
            "none": None,
            "nested": [1, (2.5, {"deep": torch.arange(3)})],
            "empty": torch.empty(0, dtype=torch.bool),
        }
    hvd.broadcast_optimizer_state(optimizer)
    state = optimizer.state[param]
    assert state["note"] == "text" and state["none"] is None
    assert state["nested"][1][1]["deep"].tolist() == [0, 1, 2]
    assert state["empty"].dtype == torch.bool


def scenario_parameters() -> None:
    for root in range(hvd.size()):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2).half())
        model[0].to(memory_format=torch.channels_last)  # not contiguous
        for tensor in model.state_dict().values():
            tensor.fill_(hvd.rank() + 1)
        names = model.state_dict() if root % 2 else model.named_parameters()
        assert hvd.broadcast_parameters(names, root_rank=root) is None
        for name, value in model.state_dict().items():
            sent = root % 2 or name in dict(model.named_parameters())
            assert (value == (root if sent else hvd.rank()) + 1).all(), name
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()


def scenario_parameters_that_are_no_tensors() -> None:
    state = {"tensor": torch.ones(2) * hvd.rank(), "extra": {"rank": hvd.rank()}, "none": None}
    hvd.broadcast_parameters(state, root_rank=hvd.size() - 1)
    assert (state["tensor"] == hvd.size() - 1).all()
    assert state["extra"] == {"rank": hvd.size() - 1} and state["none"] is None
    with pytest.raises(hvd.ArgumentError, match=r"'extra' is not a tensor.*model.state_dict\(\)"):
        hvd.broadcast_parameters(list(state.items()))
    with pytest.raises(hvd.ArgumentError, match=r"model.named_parameters\(\)"):
        hvd.broadcast_parameters(nn.Linear(2, 2).parameters())
    with pytest.raises(hvd.ArgumentError, match="'c': tensors of dtype bits8 cannot be sent"):
        hvd.broadcast_parameters({"c": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)})


def scenario_objects() -> None:
    for root in range(hvd.size()):
        sent = {"text": "x" * 100_000, "rank": hvd.rank(), "tensor": torch.ones(2)}
        received = hvd.broadcast_object(sent if hvd.rank() == root else None, root)
        assert received["rank"] == root and len(received["text"]) == 100_000
        assert (received is sent) == (hvd.rank() == root)
    assert hvd.broadcast_object(None) is None
    every = hvd.allgather_object(list(range(hvd.rank() * 1000)))
    assert [len(each) for each in every] == [1000 * rank for rank in range(hvd.size())]
    with pytest.raises(hvd.ArgumentError, match="root_rank=-1 is not a rank"):
        hvd.broadcast_object(1, -1)


def scenario_object_that_cannot_be_pickled() -> None:
    mine = (lambda: None) if hvd.rank() == 0 else "fine"
    with pytest.raises(hvd.HvdliteError, match="cannot be pickled|rank 0 could not pickle"):
        hvd.allgather_object(mine)
    if hvd.size() > 1:
        with pytest.raises(hvd.HvdliteError, match="cannot be pickled|rank 0 could not pickle"):
            hvd.broadcast_object(mine)
    assert hvd.allgather_object(1) == [1] * hvd.size()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_state = make_tests(body, sizes(1, 3))


def without_pickle() -> str:
    hvd.init()
    assert hvd.allreduce(torch.ones(1)).item() == 1
    with pytest.raises(hvd.ArgumentError) as error:
        hvd.allgather_object(1)
    return str(error.value)


def test_pickle_can_be_forbidden() -> None:
    for result in run_world(2, without_pickle, env={"HVDLITE_ALLOW_PICKLE": "0"}):
        assert "HVDLITE_ALLOW_PICKLE=0 forbids" in result.value
