"""What is said if step() reduces gradients that backward() has left as they are."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import assert_close, backward, gradients, make, make_model

PRELOAD = ("torch._dynamo",)


def warned(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in caught if one.category is hvd.UnreducedGradientsWarning]


def scenario_a_short_group_is_told_once() -> None:
    model = make_model()
    optimizer = make(model, backward_passes_per_step=3)
    for step in range(3):
        optimizer.zero_grad()
        backward(model)
        said = warned(optimizer.step)
        assert len(said) == (step == 0)
        assert all("fewer than backward_passes_per_step=3 ran" in one for one in said)


def scenario_gradients_that_never_were_sent_are_told() -> None:
    model = make_model()
    optimizer = make(model)
    with optimizer.no_sync():
        backward(model)
    (said,) = warned(optimizer.step)
    assert "or all of them under no_sync()" in said


def scenario_nothing_is_said_after_synchronize() -> None:
    model = make_model()
    optimizer = make(model, backward_passes_per_step=3)
    optimizer.zero_grad()
    backward(model)
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert len(hvd.allgather(norm.reshape(1)).unique()) == 1
    assert warned(optimizer.step) == []


def scenario_nothing_is_said_of_whole_groups() -> None:
    for arguments in ({}, {"backward_passes_per_step": 2}):
        model = make_model()
        optimizer = make(model, **arguments)
        for _ in range(arguments.get("backward_passes_per_step", 1)):
            backward(model)
        assert warned(optimizer.step) == []


def scenario_nothing_is_said_on_a_rank_without_a_backward() -> None:
    model, twin = make_model(), make_model()
    optimizer = make(model)
    if hvd.rank() == 0:
        backward(model)
        backward(twin, 1 / hvd.size())
    assert warned(optimizer.step) == []
    if hvd.rank() == 0:
        assert_close(gradients(model), gradients(twin))


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init)


test_short_groups = make_tests(body, sizes(2))
