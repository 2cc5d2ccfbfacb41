"""gradient_as_bucket_view: results have the same bits, and `grad` keeps its memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite import basics
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import (
    Branches,
    assert_close,
    backward,
    gradients,
    inputs,
    make,
    make_model,
    mean_gradients,
    raises,
    unreduced,
)

PRELOAD = ("torch._dynamo",)
STEPS = 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def make_deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a model with parameters whose sizes are not multiples of 16 bytes, and with a vector."""
    torch.manual_seed(0)
    layers = (nn.Linear(3, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1))
    return nn.Sequential(*layers).to(dtype)


def train(
    view: bool,
    model: nn.Module,
    make_optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["sgd"],
    set_to_none: bool = True,
    clip: bool = False,
    **arguments: Any,
) -> list[torch.Tensor]:
    """Train a few steps; return every gradient and parameter of every step."""
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model.parameters()),
        model.named_parameters(),
        gradient_as_bucket_view=view,
        **arguments,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    dtype = next(model.parameters()).dtype
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(arguments.get("backward_passes_per_step", 1)):
            model(torch.randn(4, 3, generator=generator).to(dtype)).square().sum().backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        seen += [gradient.clone() for gradient in gradients(model)]
        seen += [param.detach().clone() for param in model.parameters()]
    return seen


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other), (one, other)


def slots_of(model: nn.Module) -> set[int]:
    """Return the memory blocks of the gradients, by their addresses."""
    return {gradient.untyped_storage().data_ptr() for gradient in gradients(model)}


def scenario_the_bits_are_those_without() -> None:
    weight = {"weight": hvd.rank() + 0.5}
    cases: list[dict[str, Any]] = [
        {},
        {"backward_passes_per_step": 2},
        {"clip": True},
        {"num_groups": 3},
        {"bucket_cap_mb": 1e-5},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"op": hvd.Sum, "gradient_predivide_factor": 1.0},
        {"gradient_predivide_factor": 2.0},
        weight,
    ]
    for name, set_to_none, case in itertools.product(OPTIMIZERS, (True, False), cases):
        arguments = {"make_optimizer": OPTIMIZERS[name], "set_to_none": set_to_none, **case}
        model = make_deep()
        ours = train(True, model, **arguments)
        assert_same_bits(ours, train(False, make_deep(), **arguments))
        assert len(slots_of(model)) == 1
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for set_to_none in (True, False):
            ours = train(True, make_deep(dtype), set_to_none=set_to_none)
            assert_same_bits(ours, train(False, make_deep(dtype), set_to_none=set_to_none))


def scenario_parameters_of_several_types_and_groups() -> None:
    def mixed() -> nn.Module:
        model = make_deep()
        model[3].to(torch.float64)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return model[4](model[3](model[2](model[1](model[0](x))).double()).float())

        model.forward = forward  # type: ignore[method-assign]
        return model

    for pick in (None, lambda params: [params[1:5], params[5:]]):
        ours, theirs = mixed(), mixed()
        groups = [None if pick is None else pick(list(one.parameters())) for one in (ours, theirs)]
        assert_same_bits(
            train(True, ours, groups=groups[0]), train(False, theirs, groups=groups[1])
        )
        assert len(slots_of(ours)) == 2


def make_wide() -> nn.Module:
    """Make a model whose gradients take several chunks of shared memory."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 700), nn.Tanh(), nn.Linear(700, 700), nn.Linear(700, 1))


def unstaged() -> int:
    return basics.engine().counters()["bytes_unstaged"]


def scenario_gradients_that_are_kept_are_shared_with_the_host() -> None:
    for set_to_none in (True, False):
        before = unstaged()
        ours = train(True, make_wide(), set_to_none=set_to_none)
        assert (unstaged() > before) == (not set_to_none and hvd.size() > 1)
        assert_same_bits(ours, train(False, make_wide(), set_to_none=set_to_none))


def scenario_kept_gradients_of_one_rank_alone_are_not_shared() -> None:
    before = unstaged()
    ours = train(True, make_wide(), set_to_none=hvd.rank() == 0)
    assert hvd.size() == 1 or unstaged() == before
    assert_same_bits(ours, train(False, make_wide()))


def scenario_gradients_stay_where_they_are() -> None:
    for set_to_none in (True, False):
        model = make_model()
        optimizer = make(model, gradient_as_bucket_view=True)
        with optimizer.no_sync():
            backward(model)
        first = gradients(model)
        with unreduced(optimizer):
            optimizer.step()
        views = gradients(model)
        assert not any(view is one for view, one in zip(views, first, strict=True))
        assert_close(views, mean_gradients())
        kept = [view.clone() for view in views]
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, 2.0)
        optimizer.step()
        assert all(view is one for view, one in zip(gradients(model), views, strict=True))
        assert not any(torch.equal(view, one) for view, one in zip(views, kept, strict=True))


def scenario_what_the_user_puts_there() -> None:
    model = make_model()
    optimizer = make(model, lr=0.0, gradient_as_bucket_view=True)
    backward(model)
    optimizer.step()
    views = gradients(model)
    own = [torch.zeros_like(view) for view in views]
    for param, gradient in zip(model.parameters(), own, strict=True):
        param.grad = gradient
    backward(model)
    optimizer.step()
    assert all(view is one for view, one in zip(gradients(model), views, strict=True))
    assert_close(views, mean_gradients())
    backward(alone := make_model())
    assert_close(own, gradients(alone))  # packed, and left as they were
    # Views of each other's memory, which packing overwrites.
    bias, other = model[0].bias, model[2].bias
    expected = hvd.allreduce(bias.grad[:2].clone()), hvd.allreduce(other.grad.clone())
    other.grad, bias.grad = bias.grad[:2], torch.cat([other.grad, other.grad])
    optimizer.synchronize()
    assert torch.equal(other.grad, expected[0])
    assert torch.equal(bias.grad, torch.cat([expected[1]] * 2))


def halve(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


def replace_data(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data.clamp(-1, 1)


def replace_storage(gradient: torch.Tensor) -> None:
    gradient.set_(torch.zeros_like(gradient))  # type: ignore[call-overload]


def scenario_what_a_hook_changes_under_way_is_noticed() -> None:
    for view, change in itertools.product((False, True), (halve, replace_data, replace_storage)):
        model = make_model()
        optimizer = make(
            model, lr=0.0, gradient_as_bucket_view=view, overlap=True, bucket_cap_mb=1e-6
        )
        for set_to_none in (True, False):
            backward(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        # The last layer's gradients are on their way when the first layer's comes.
        hook = model[0].weight.register_post_accumulate_grad_hook(
            lambda _, bias=model[2].bias, change=change: change(bias.grad)
        )
        with raises(
            r"gradient of 2\.bias was changed while it was being reduced.*"
            r"call optimizer.synchronize\(\) after"
        ):
            backward(model)
        hook.remove()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert_close(gradients(model), mean_gradients())


def scenario_no_gradient_anywhere_stays_none() -> None:
    model = Branches()
    optimizer = make(model, lr=0.0, gradient_as_bucket_view=True)
    for rare_rank in (0, 1, None, 0):
        optimizer.zero_grad()
        model(torch.ones(1, 3), rare=hvd.rank() == rare_rank).sum().backward()
        optimizer.step()
        assert model.never.bias.grad is None
        if rare_rank is None:
            assert model.rare.bias.grad is None
        else:
            assert torch.equal(model.rare.bias.grad, torch.full((2,), 0.5))
        assert torch.equal(model.used.bias.grad, torch.ones(2))


def scenario_a_model_that_moves_keeps_its_own_gradients() -> None:
    for set_to_none in (True, False):
        model = make_model()
        optimizer = make(model, lr=0.0, gradient_as_bucket_view=True)
        for step in range(4):
            if step == 1:
                model.to(torch.float64)
            if step == 3:
                model.to(torch.float32)
            optimizer.zero_grad(set_to_none=set_to_none)
            model(inputs().to(model[0].weight.dtype)).square().sum().backward()
            optimizer.step()
            assert_close([one.float() for one in gradients(model)], mean_gradients())


def scenario_strides_are_those_of_the_parameters() -> None:
    def convolution() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1))
        return model.to(memory_format=torch.channels_last)

    for set_to_none in (True, False):
        model = convolution()
        ours = train(True, model, set_to_none=set_to_none)
        assert_same_bits(ours, train(False, convolution(), set_to_none=set_to_none))
        assert model[1].weight.grad.stride() == model[1].weight.stride()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_bucket_view = make_tests(body, sizes(2))
