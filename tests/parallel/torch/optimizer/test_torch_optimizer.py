"""DistributedOptimizer in training loops, on one, two and three ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.slow_path import slow_path
from parallel.torch.small_models import (
    Branches,
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


def scenario_it_is_the_optimizer_itself() -> None:
    sgd = torch.optim.SGD(make_model().parameters(), lr=0.1)
    groups, state = sgd.param_groups, sgd.state
    distributed = hvd.DistributedOptimizer(sgd)
    assert isinstance(distributed, torch.optim.SGD)
    assert type(distributed).__name__ == "SGD" and "SGD" in repr(distributed)
    assert distributed.param_groups is groups and distributed.state is state
    with raises("already"):
        hvd.DistributedOptimizer(distributed)


def scenario_groups_of_parameters() -> None:
    model = make_model()
    params = list(model.parameters())
    optimizer = make(model, groups=[params[:2], [params[3]]])
    backward(model)
    optimizer.step()
    assert_close(gradients(model), mean_gradients())
    with raises("in two of the groups"):
        make(make_model(), groups=[params[:1], params[:1]])


def scenario_one_operation_per_bucket_and_step() -> None:
    model = make_model()
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    before = counters()["tensors"]
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    optimizer.synchronize()  # of a step without a backward: zeros from all
    assert counters()["tensors"] - before == 2 * (
        4 + 2
    )  # four parameters, the layout and the flags


def scenario_backward_passes_per_step() -> None:
    model = make_model()
    optimizer = make(model, lr=0.0, backward_passes_per_step=2)
    for factor in (0.25, 0.75):
        assert not optimizer._reducer.in_flight
        backward(model, factor)
    optimizer.step()
    assert_close(gradients(model), mean_gradients())
    optimizer.zero_grad()
    backward(model)
    with unreduced(optimizer):
        optimizer.step()
    assert_close(gradients(model), mean_gradients())
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert_close(gradients(model), mean_gradients())
    with raises("at least 1"):
        optimizer.set_backward_passes_per_step(0)


def scenario_a_loss_that_passes_by_another_optimizer() -> None:
    model = make_model()
    generator = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
    critic = hvd.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))
    for _ in range(2):
        generator.zero_grad()
        with critic.no_sync():
            backward(model)
        generator.step()
        critic.zero_grad()
        model[2](model[0](inputs()).detach()).sum().backward()
        critic.step()
    assert_same_everywhere(model)


def scenario_a_rank_without_data() -> None:
    model = make_model()
    optimizer = make(model)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.weight = 1.0 if hvd.rank() == 0 else 0.0
        if hvd.rank() == 0:
            backward(model)
        optimizer.step()
        if step == 0:
            assert_close(gradients(model), mean_gradients([1.0] + [0.0] * (hvd.size() - 1)))
    assert_same_everywhere(model)


def scenario_weight() -> None:
    weights = [rank + 1.0 for rank in range(hvd.size())]
    for arguments in ({"weight": weights[hvd.rank()]}, {"weight": lambda: weights[hvd.rank()]}):
        model = make_model()
        optimizer = make(model, **arguments)
        backward(model)
        optimizer.step()
        assert_close(gradients(model), mean_gradients(weights))


def scenario_callable_weight_is_called_once_per_step() -> None:
    calls: list[int] = []

    def weight() -> float:
        calls.append(len(calls))
        return hvd.rank() + 10.0 ** len(calls)  # another one if a bucket asked again

    model = make_model()
    optimizer = make(model, weight=weight, groups=100)
    for step in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert len(calls) == step + 1


def scenario_weight_zero_counts_as_no_gradient() -> None:
    model = Branches()
    optimizer = make(model, weight=float(hvd.rank() > 0))
    model(torch.ones(1, 3), rare=hvd.rank() == 0).sum().backward()
    optimizer.step()
    assert model.rare.weight.grad is None
    assert (model.used.weight.grad is None) == (hvd.size() == 1)


def scenario_torchs_default_device_is_not_asked() -> None:
    table, words = nn.Embedding(6, 2, sparse=True), torch.tensor([hvd.rank(), 5])
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = make(table, weight=1.0 + hvd.rank())
    sampler = hvd.elastic.ElasticSampler(range(8))
    torch.set_default_device("meta")  # What is made there has no values to send.
    try:
        for step in range(3):  # The second step sends rows.
            optimizer.zero_grad()
            if step < 2 or hvd.rank() == 0:  # In the third, some ranks have none.
                table(words).sum().backward()
            optimizer.step()
        assert len(list(sampler)) == -(-8 // hvd.size())
    finally:
        torch.set_default_device(None)
    gradient = table.weight.grad.to_dense()
    assert gradient[5].tolist() == gradient[0].tolist() != [0.0, 0.0]


def scenario_names() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises("called 'a'"):
        hvd.DistributedOptimizer(sgd, [("a", p) for p in model.parameters()])
    with raises("lacks 3 of the optimizer's parameters"):
        hvd.DistributedOptimizer(sgd, [("a", next(model.parameters()))])
    with raises(r"takes \(name, parameter\) pairs"):
        hvd.DistributedOptimizer(sgd, model.parameters())
    with raises("makes no gradient"):
        hvd.DistributedOptimizer(sgd, op=hvd.Max)
    assert type(sgd) is torch.optim.SGD


def scenario_gradients_without_backward_are_reduced_by_step() -> None:
    def assign(model: nn.Module) -> None:
        loss = model(inputs()).square().sum()
        params = list(model.parameters())
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = gradient

    for options in ({}, {"gradient_as_bucket_view": True}, {"weight": 2.0}):
        for drop in (False, True):
            model = make_model()
            optimizer = make(model, **options)
            (0 * model(inputs()).sum()).backward()
            if drop:
                model.zero_grad()
            assign(model)
            optimizer.step()
            assert_close(gradients(model), mean_gradients())
            assert_same_everywhere(model)
    model = make_model()
    optimizer = make(model, op=hvd.Sum)
    backward(model)
    assign(model)
    with raises("only an average may be reduced again: change gradients in place, or call zero_g"):
        optimizer.step()
    optimizer.zero_grad()
    assign(model)
    optimizer.step()
    assert_close(gradients(model), [hvd.size() * gradient for gradient in mean_gradients()])


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


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


def body_without_fast_path() -> dict[str, str]:
    with slow_path():
        return body()


test_optimizer = make_tests(body, sizes(1, 2, 3))
test_optimizer_without_the_fast_path = make_tests(body_without_fast_path, sizes(2))


def test_needs_init() -> None:
    with pytest.raises(hvd.NotInitializedError, match="init"):
        make(make_model())
