"""Gradients are reduced when backward() returns, whatever scripts do before step()."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd
from hvdlite import _core, basics
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import (
    Branches,
    Checkpointed,
    TwoHeads,
    assert_close,
    assert_same_everywhere,
    backward,
    counters,
    gradients,
    inputs,
    make,
    make_model,
    mean_gradients,
    raises,
    unreduced,
)

PRELOAD = ("torch._dynamo",)


def factor_times(gradients: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [factor * gradient for gradient in gradients]


def scenario_gradients_are_there_when_backward_returns() -> None:
    for options in (
        {},
        {"bucket_cap_mb": 1e-6},
        {"num_groups": 2},
        {"groups": 3},
        {"groups": 100},
        {"gradient_as_bucket_view": True},
        {"gradient_predivide_factor": 2.0},
        {"weight": 2.0},
    ):
        model = make_model()
        optimizer = make(model, lr=1.0, **options)
        for _ in range(2):
            optimizer.zero_grad()
            for param, start in zip(model.parameters(), make_model().parameters(), strict=True):
                param.data.copy_(start)
            backward(model)
            assert_close(gradients(model), mean_gradients())
            assert not optimizer._reducer.in_flight
            sent = counters()["tensors"]
            optimizer.synchronize()
            optimizer.step()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert counters()["tensors"] == sent
        assert_same_everywhere(model)


def scenario_the_last_of_several_passes_reduces() -> None:
    for view in (False, True):
        model, alone = make_model(), make_model()
        optimizer = make(model, backward_passes_per_step=3, gradient_as_bucket_view=view)
        for number in range(1, 4):
            backward(alone, 1 / 3)
            backward(model, 1 / 3)
            expected = gradients(alone) if number < 3 else mean_gradients()
            assert_close(gradients(model), expected)
        optimizer.step()
        assert_same_everywhere(model)


def scenario_no_sync_sends_nothing() -> None:
    model, alone = make_model(), make_model()
    optimizer = make(model)
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        backward(model, 0.25)  # still inside of the outer one
    backward(alone, 0.25)
    assert_close(gradients(model), gradients(alone))
    backward(model, 0.75)
    assert_close(gradients(model), mean_gradients())
    with optimizer.no_sync():
        backward(model, 1.0)  # added to the reduced gradients, and left to step()
    with unreduced(optimizer):
        optimizer.step()
    assert_close(gradients(model), factor_times(mean_gradients(), 2.0))
    assert_same_everywhere(model)


def scenario_undeclared_accumulation_averages_each_part() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}):
        model = make_model()
        optimizer = make(model, **options)
        for number in range(1, 5):
            backward(model, 0.25)
            assert_close(gradients(model), factor_times(mean_gradients(), number / 4))
        optimizer.step()
        assert_same_everywhere(model)


def scenario_a_sum_is_not_summed_again() -> None:
    model = make_model()
    optimizer = make(model, op=hvd.Sum)
    total = factor_times(mean_gradients(), hvd.size())
    backward(model)
    assert_close(gradients(model), total)
    with raises(r"cannot be summed again; with op=hvd\.Sum say backward_passes_per_step=, run"):
        backward(model)
    with optimizer.no_sync(), raises("cannot be summed again"):
        backward(model)
    for zero in (optimizer.zero_grad, model.zero_grad):
        zero()
        with optimizer.no_sync():
            backward(model, 0.5)
        backward(model, 0.5)
        assert_close(gradients(model), total)
    zero()
    optimizer.zero_grad(set_to_none=False)
    backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward(model)
    optimizer.step()
    assert_same_everywhere(model)


def mean_of_heads() -> list[torch.Tensor]:
    model = TwoHeads()
    for rank in range(hvd.size()):
        a, b = model.losses(inputs(rank))
        ((a + b) / hvd.size()).backward()
    return gradients(model)


def scenario_two_losses_of_one_graph() -> None:
    for options in ({}, {"backward_passes_per_step": 2}, {"gradient_as_bucket_view": True}):
        model = TwoHeads()
        optimizer = make(model, **options)
        a, b = model.losses(inputs())
        a.backward(retain_graph=True)
        b.backward()
        assert_close(gradients(model), mean_of_heads())
        optimizer.step()
        assert_same_everywhere(model)


def scenario_losses_in_another_order_on_each_rank() -> None:
    model = TwoHeads()
    optimizer = make(model)
    losses = model.losses(inputs())
    for loss in losses if hvd.rank() == 0 else losses[::-1]:
        loss.backward(retain_graph=True)
    assert_close(gradients(model), mean_of_heads())
    optimizer.step()
    assert_same_everywhere(model)


def scenario_checkpoints() -> None:
    expected = Checkpointed(False, "none")
    for rank in range(hvd.size()):
        (expected(inputs(rank)).sum() / hvd.size()).backward()
    for reentrant in (True, False):
        for parts in ("end", "all", "nested"):
            for options in ({}, {"bucket_cap_mb": 1e-6}):
                model = Checkpointed(reentrant, parts)
                optimizer = make(model, lr=0.0, **options)
                for _ in range(2):
                    optimizer.zero_grad()
                    model(inputs().requires_grad_()).sum().backward()
                    assert not optimizer._reducer.in_flight, (reentrant, parts)
                    assert_close(gradients(model), gradients(expected))
                    optimizer.step()


def scenario_a_layer_in_two_checkpoints() -> None:
    layer = nn.Linear(3, 3)
    hvd.broadcast_parameters(layer.state_dict())
    alone = copy.deepcopy(layer)

    def run(layer: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.square().sum()

    for rank in range(hvd.size()):
        (run(alone, inputs(rank), False) / hvd.size()).backward()

    def check(**options: Any) -> None:
        optimizer = make(layer, lr=0.0, **options)
        for _ in range(3):
            run(layer, inputs().requires_grad_(), True).backward()
            optimizer.synchronize()
            assert_close(gradients(layer), gradients(alone))
            optimizer.zero_grad()

    check(overlap=False)
    check(overlap=False, gradient_as_bucket_view=True)
    optimizer = make(layer, lr=0.0, overlap=True)
    for _ in range(2):
        with raises("times before it was reduced.*set use_reentrant=False, or overlap=False"):
            run(layer, inputs().requires_grad_(), True).backward()
        optimizer.zero_grad()
        run(layer, inputs(), False).backward()
        assert_close(gradients(layer), gradients(alone))
        optimizer.zero_grad()


def scenario_a_rank_whose_backward_touches_some_parameters_or_none() -> None:
    for rare_rank in range(hvd.size()):
        model = Branches()
        optimizer = make(model, lr=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3), rare=hvd.rank() == rare_rank).sum().backward()
            assert torch.allclose(model.rare.bias.grad, torch.full((2,), 1 / hvd.size()))
            assert model.never.weight.grad is None
            optimizer.step()
        for idle in ("no backward", "another backward"):
            optimizer.zero_grad()
            if hvd.rank() == rare_rank:
                model(torch.ones(1, 3), rare=True).sum().backward()
            elif idle == "another backward":
                torch.ones(2, requires_grad=True).sum().backward()
            optimizer.step()  # zeros from ranks without a backward
            assert torch.allclose(model.used.bias.grad, torch.full((2,), 1 / hvd.size()))


def scenario_two_optimizers_in_another_order_on_each_rank() -> None:
    model = TwoHeads()
    extra = Branches()
    optimizers = [make(model, lr=0.0), make(extra, lr=0.0)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Each rank leaves out a head, so that its bucket is submitted at the end of backward.
        one = model.losses(inputs())[hvd.rank() % 2]
        other = extra(torch.ones(1, 3), rare=hvd.rank() == 0).sum()
        total = one + other if hvd.rank() == 0 else other + one
        total.backward()
        assert not any(optimizer._reducer.in_flight for optimizer in optimizers)
        assert torch.allclose(extra.rare.bias.grad, torch.full((2,), 1 / hvd.size()))
        for optimizer in optimizers if hvd.rank() == 0 else optimizers[::-1]:
            optimizer.step()


def scenario_a_rank_that_calls_backward_more_often_is_noticed() -> None:
    if hvd.size() == 1:
        return
    for options in ({}, {"weight": 1.0}, {"compression": hvd.Compression.bf16}):
        model = make_model()
        optimizer = make(model, lr=0.0, **options)
        for step in range(20):
            optimizer.zero_grad()
            backward(model)
            if step < 19:
                optimizer.step()
        if hvd.rank() > 0:
            optimizer.step()
        with raises(r"rank \d: the gradients of its step \d+, in 'gradients.*met those of another"):
            backward(model)  # the second of a step here, the first of the next one there
        optimizer.zero_grad()
        del optimizer


def scenario_only_the_backward_of_parameters_reduces() -> None:
    model = make_model()
    optimizer = make(model)
    sent = counters()["tensors"]
    loss = model(inputs()).square().sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    x = inputs().requires_grad_()
    model(x).sum().backward(inputs=[x])
    assert counters()["tensors"] == sent and not gradients(model)
    loss.backward(inputs=[model[0].weight], retain_graph=True)
    assert_close([model[0].weight.grad], mean_gradients()[:1])
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="will create a reference cycle"):
        loss.backward(create_graph=True)
    assert_close(gradients(model), mean_gradients())
    optimizer.step()
    optimizer.zero_grad()


class Trouble(Exception):
    """The exception of a script's hook."""


@contextlib.contextmanager
def trouble_in(module: nn.Module, raises_here: bool) -> Iterator[None]:
    def hook(*_: Any) -> None:
        if raises_here:
            raise Trouble("in backward")

    handle = module.register_full_backward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def scenario_an_exception_inside_of_backward() -> None:
    for guilty in (None, 0, hvd.size() - 1):
        for options in ({}, {"bucket_cap_mb": 1e-6}, {"backward_passes_per_step": 2}):
            model = make_model()
            optimizer = make(model, lr=0.0, **options)
            passes = options.get("backward_passes_per_step", 1)
            here = guilty in (None, hvd.rank())
            with trouble_in(model[1], here):
                for number in range(passes):
                    expected = pytest.raises(Trouble) if here else contextlib.nullcontext()
                    with expected:
                        backward(model)
                    if here and number + 1 < passes:
                        optimizer.zero_grad()
            if passes > 1:
                optimizer.synchronize()
                optimizer.step()
            optimizer.zero_grad()
            for _ in range(passes):
                backward(model, 1 / passes)
            assert_close(gradients(model), mean_gradients())
            optimizer.step()


def scenario_zero_grad_while_gradients_are_under_way_is_an_error() -> None:
    model = make_model()
    optimizer = make(model, overlap=True, bucket_cap_mb=1e-6)

    def zero(_: torch.Tensor) -> None:
        with raises("would race with the reduction"):
            optimizer.zero_grad()

    model[0].weight.register_post_accumulate_grad_hook(zero)  # The last layer is under way then.
    backward(model)
    optimizer.step()
    assert_close(gradients(model), mean_gradients())


def scenario_zero_grad_after_backward_drops_gradients() -> None:
    for passes in (2, 1):
        model = make_model()
        optimizer = make(model, backward_passes_per_step=passes)
        for set_to_none in (True, False):
            backward(model, 100.0)
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(passes):
                backward(model, 1 / passes)
            assert_close(gradients(model), mean_gradients())
            optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.weight = 1.0  # nothing is in flight
    backward(model)
    optimizer.step()


def scenario_sparse_gradients() -> None:
    torch.manual_seed(0)
    for rows in (6, 500):
        table = nn.Embedding(rows, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()))
        expected = torch.zeros(rows, 2)
        expected[: hvd.size()] = 1 / hvd.size()
        expected[5] += 1
        for _ in range(3):
            optimizer.zero_grad()
            for number in (1, 2):  # the second one adds to reduced gradients
                table(torch.tensor([hvd.rank(), 5])).sum().backward()
                assert table.weight.grad.is_sparse
                assert torch.allclose(table.weight.grad.to_dense(), number * expected)
            optimizer.step()
        assert_same_everywhere(table)


def scenario_errors_of_a_collective_are_raised_by_backward() -> None:
    if hvd.size() == 1:
        return
    layer = nn.Linear(3 + hvd.rank(), 2)
    optimizer = make(layer)
    for _ in range(2):
        with raises("'weight': ranks disagree about the shape"):
            layer(torch.ones(1, 3 + hvd.rank())).sum().backward()
        optimizer.zero_grad()
    hvd.barrier()


def scenario_without_overlap_gradients_have_the_same_bits() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        results = []
        for overlap in (True, False):
            model, sent = make_model(), []
            optimizer = make(model, overlap=overlap, bucket_cap_mb=1e-6, **options)
            # The first layer's gradient comes last, when the others can be in flight.
            see = lambda _, seen=sent, one=optimizer._reducer: seen.append(one.in_flight)  # noqa: E731
            model[0].weight.register_post_accumulate_grad_hook(see)
            backward(model)
            assert sent == [overlap] and not optimizer._reducer.in_flight
            results.append(gradients(model))
            del optimizer, see
        assert all(map(torch.equal, *results))


def scenario_buckets_are_sent_during_backward_where_a_core_is_idle() -> None:
    for cores in (hvd.size(), hvd.size() + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core, "available_cores", lambda cores=cores: cores)
            optimizer = make(make_model())
            assert optimizer._reducer._overlaps == (cores > hvd.size())


def scenario_live_figures_know_backward_without_overlap() -> None:
    model = make_model()
    optimizer = make(model, overlap=False, bucket_cap_mb=1e-6)
    model[0].weight.register_hook(lambda _: time.sleep(0.02))
    before = steps()
    for _ in range(8):
        backward(model)
        optimizer.step()
    if hvd.rank() == 0:
        count, spent = (after - earlier for after, earlier in zip(steps(), before, strict=True))
        assert count >= 6 and spent >= 0.015 * count, (count, spent)


def steps() -> tuple[int, float]:
    """Return, on rank 0, the number of steps and the seconds that its backward took in them."""
    told = basics.engine().live()["steps"]
    return (0, 0.0) if told is None else (told["count"], told["ranks"][0][0])


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_backward = make_tests(body, sizes(1, 2, 3))
