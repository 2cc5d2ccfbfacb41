"""A parameter has one optimizer of hvdlite, which a hook may step inside of backward()."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import (
    assert_close,
    assert_same_everywhere,
    backward,
    gradients,
    inputs,
    make,
    make_model,
    raises,
)

PRELOAD = ("torch._dynamo",)
SGD = functools.partial(torch.optim.SGD, lr=0.1)

KINDS: dict[str, Callable[[Any], Any]] = {
    "average": hvd.DistributedOptimizer,
    "adasum": functools.partial(hvd.DistributedOptimizer, op=hvd.Adasum),
    "local": hvd.LocalSGD,
    "sharded": hvd.ShardedOptimizer,
}


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def scenario_the_second_one_is_refused_whatever_both_are() -> None:
    for first in KINDS.values():
        for second in KINDS.values():
            model = make_model()
            one = first(SGD(model.parameters()))
            with raises("of SGD .* and the .* of SGD .*, which was made before it, would both"):
                second(SGD([{"params": [param]} for param in model.parameters()]))
            step(model, one)


def scenario_the_message_names_both_and_the_parameter() -> None:
    model = make_model()
    first = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
    with raises(r"the DistributedOptimizer of Adam \(gradients.*of SGD \(gradients.* of 2.weight:"):
        hvd.DistributedOptimizer(torch.optim.Adam([model[2].weight]))
    with raises(r"of 2.weight: delete the earlier one first, and what holds it"):
        hvd.LocalSGD(torch.optim.Adam([model[2].weight]))
    del first


def scenario_a_refused_optimizer_is_as_before() -> None:
    model = make_model()
    first = hvd.DistributedOptimizer(SGD(model.parameters()))
    plain = SGD(model.parameters())
    with pytest.raises(hvd.ArgumentError) as caught:
        hvd.DistributedOptimizer(plain)
    assert type(plain) is torch.optim.SGD
    del first
    second = hvd.DistributedOptimizer(plain)  # The error that is still there holds nothing.
    step(model, second)
    assert_same_everywhere(model)
    del caught


def scenario_one_that_is_garbage_blocks_nothing() -> None:
    model = make_model()
    gc.disable()
    try:
        first: Any = hvd.DistributedOptimizer(SGD(model.parameters()))
        first.itself = first
        del first
        second = hvd.DistributedOptimizer(SGD(model.parameters()))
    finally:
        gc.enable()
    step(model, second)
    assert_same_everywhere(model)


def scenario_a_group_that_another_one_has() -> None:
    model = make_model()
    for kind in KINDS.values():
        first = kind(SGD(model[0].parameters()))
        second = kind(SGD(model[2].parameters()))
        with raises("would both reduce the gradient of"):
            second.add_param_group({"params": model[0].parameters()})
        assert len(second.param_groups) == 1
        del first, second


def scenario_process_sets_that_have_no_rank_in_common() -> None:
    halves = [hvd.add_process_set([0]), hvd.add_process_set(list(range(1, hvd.size())))]
    model = make_model()
    both = [hvd.DistributedOptimizer(SGD(model.parameters()), process_set=one) for one in halves]
    step(model, both[0] if halves[0].included() else both[1])
    del both
    first = hvd.DistributedOptimizer(SGD(model.parameters()), process_set=halves[0])
    if hvd.rank() == 0:
        with raises("would both reduce"):
            hvd.DistributedOptimizer(SGD(model.parameters()), process_set=halves[0])
    del first
    for one in halves:
        hvd.remove_process_set(one)


def scenario_steps_inside_of_backward() -> None:
    reference = make_model()
    for _ in range(3):
        summed = [torch.zeros_like(param) for param in reference.parameters()]
        for rank in range(hvd.size()):
            reference.zero_grad()
            (reference(inputs(rank)).square().sum() / hvd.size()).backward()
            torch._foreach_add_(summed, gradients(reference))
        for param, gradient in zip(reference.parameters(), summed, strict=True):
            param.data -= 0.1 * gradient
    # A hook that was there first sees this rank's gradient, and its step reduces it.
    for hooks_first, options in itertools.product((False, True), ({}, {"overlap": True})):
        model, optimizers = make_model(), {}

        def step(param: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()
            assert param.grad is None

        for number, param in enumerate(model.parameters()):
            if hooks_first:
                param.register_post_accumulate_grad_hook(step)
            optimizers[param] = hvd.DistributedOptimizer(
                torch.optim.SGD([param], lr=0.1), [(f"{number}", param)], **options
            )
            if not hooks_first:
                param.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            backward(model)
        assert_close(list(model.parameters()), list(reference.parameters()))
        assert_same_everywhere(model)


def scenario_a_hook_that_steps_another_optimizer() -> None:
    for hooks_first in (False, True):
        model = make_model()
        optimizer: Any = None

        def step(param: torch.Tensor) -> None:
            torch.optim.SGD([param], lr=0.1).step()
            param.grad = None

        for first in (True, False):
            if first is not hooks_first:
                optimizer = make(model)
                continue
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(step)
        with raises("gone before it was reduced: a hook of the script has used it"):
            backward(model)
        optimizer.zero_grad()


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init)


test_two_optimizers = make_tests(body, sizes(2))
