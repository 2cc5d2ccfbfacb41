"""One gradient has one reducer, however many optimizers have its parameter."""

from __future__ import annotations

import gc
from typing import Any

import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import (
    assert_close,
    assert_same_everywhere,
    backward,
    gradients,
    make,
    make_model,
    mean_gradients,
    raises,
)

PRELOAD = ("torch._dynamo",)
SGD = torch.optim.SGD


def weights(size: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size)) for _ in range(4)]


def backward_by_rank(params: list[torch.nn.Parameter]) -> None:
    """Give parameter i the gradient (rank + 1) (i + 1)."""
    losses = [param.sum() * (hvd.rank() + 1) * (i + 1) for i, param in enumerate(params)]
    torch.stack(losses).sum().backward()


def mean(index: int) -> float:
    return (hvd.size() + 1) / 2 * (index + 1)


def check_means(params: list[torch.nn.Parameter]) -> None:
    for index, param in enumerate(params):
        assert param.grad is not None
        assert param.grad.min() == param.grad.max() == mean(index), (index, param.grad.unique())


def scenario_two_living_optimizers_of_the_same_parameters() -> None:
    for size in (1000, 300_000):
        for overlap in (None, True, False):
            params = weights(size)
            first = hvd.DistributedOptimizer(SGD(params, lr=0.0), overlap=overlap)
            adagrad = torch.optim.Adagrad(params, lr=0.0)
            second = hvd.DistributedOptimizer(adagrad, overlap=overlap)
            for _ in range(12):
                first.zero_grad()
                second.zero_grad()
                backward_by_rank(params)
                check_means(params)
                second.step()


def scenario_an_optimizer_for_the_start_is_kept() -> None:
    kept, params = [], weights(10)
    for number, kind in enumerate((torch.optim.Adam, SGD, SGD)):
        kept.append(hvd.DistributedOptimizer(kind(params, lr=0.0), op=hvd.Sum))
        for _ in range(3):
            kept[-1].zero_grad()
            backward_by_rank(params)
            for index, param in enumerate(params):
                assert param.grad.unique().tolist() == [mean(index) * hvd.size()], number
            kept[-1].step()


def scenario_two_step_in_turns() -> None:
    model, twin = make_model(), make_model()
    first, second = make(model), make(model, lr=0.03)
    plain = [SGD(twin.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.03)]
    for step in range(3):
        for optimizer, other in zip((first, second), plain, strict=True):
            optimizer.zero_grad()
            backward(model)
            ours = gradients(model)
            optimizer.step()
            for param, gradient in zip(twin.parameters(), ours, strict=True):
                param.grad = gradient.clone()
            other.step()
        if step == 0:
            assert_same_everywhere(model)
    assert_close(list(model.parameters()), list(twin.parameters()))
    assert_same_everywhere(model)


def scenario_both_step_after_one_backward() -> None:
    model = make_model()
    first, second = make(model), make(model)
    backward(model)
    first.step()
    second.step()
    assert_close(gradients(model), mean_gradients())
    assert_same_everywhere(model)


def scenario_a_rank_without_a_backward_takes_part() -> None:
    params = weights(5)
    first, second = (hvd.DistributedOptimizer(SGD(params, lr=0.1)) for _ in range(2))
    for _ in range(3):
        first.zero_grad()
        if hvd.rank() > 0:
            backward_by_rank(params)
        first.step()
        total = sum(rank + 1 for rank in range(1, hvd.size())) / hvd.size()
        assert torch.allclose(params[0].grad, torch.full((5,), float(total)))
    del second


def scenario_a_layer_of_two_models() -> None:
    shared, one, two = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    first = hvd.DistributedOptimizer(SGD([shared, one], lr=0.1))
    second = hvd.DistributedOptimizer(SGD([shared, two], lr=0.1))
    for optimizer, own in ((first, one), (second, two)) * 2:
        optimizer.zero_grad()
        backward_by_rank([shared, own])
        check_means([shared, own])
        optimizer.step()


def scenario_no_sync_of_the_first_one() -> None:
    model = make_model()
    first, second = make(model), make(model)
    with first.no_sync():
        backward(model, 0.25)
    backward(model, 0.75)
    assert_close(gradients(model), mean_gradients())
    first.step()
    del second


def scenario_a_parameter_that_thaws_later() -> None:
    params = weights(7)
    params[1].requires_grad_(False)
    first, second = (hvd.DistributedOptimizer(SGD(params, lr=0.0)) for _ in range(2))
    params[1].requires_grad_(True)
    for _ in range(3):
        second.zero_grad()
        backward_by_rank(params)
        second.step()
    check_means(params)
    del first


def scenario_a_parameter_that_is_added_later() -> None:
    params = weights(7)
    first = hvd.DistributedOptimizer(SGD(params[:2], lr=0.0))
    second = hvd.DistributedOptimizer(SGD(params[2:], lr=0.0))
    first.add_param_group({"params": params[2:]})
    for _ in range(3):
        first.zero_grad()
        backward_by_rank(params)
        check_means(params)
        second.step()
        first.step()


def scenario_a_group_is_added_to_one_that_has_given_all_up() -> None:
    for with_gradients in (False, True):
        model = make_model()
        early, late = list(model[0].parameters()), list(model[2].parameters())
        first = hvd.DistributedOptimizer(SGD(early, lr=0.1))
        second = hvd.DistributedOptimizer(SGD(early, lr=0.1))
        if with_gradients:
            backward(model)
        first.add_param_group({"params": late})
        for step in range(3):
            if step > 0 or not with_gradients:
                backward(model)
            first.step()
            assert_same_everywhere(model)
            first.zero_grad()
        del second


def scenario_adasum_beside_an_optimizer_that_reduces_the_same_gradients() -> None:
    for plain_first in (True, False):
        model = make_model()
        params = list(model.parameters())
        if plain_first:
            plain = hvd.DistributedOptimizer(SGD(params, lr=0.0))
        adasum = hvd.DistributedOptimizer(SGD(params, lr=0.1), op=hvd.Adasum)
        if not plain_first:
            plain = hvd.DistributedOptimizer(SGD(params, lr=0.0))
        backward(model)
        with raises("of SGD .* reduces the same gradients, so that"):
            adasum.step()
        plain.zero_grad()
        del plain
        backward(model)
        adasum.step()
        assert_same_everywhere(model)


def scenario_adasum_over_gradients_that_fewer_ranks_have_reduced() -> None:
    alone = hvd.add_process_set([0])
    moved = []
    for members in (None, alone):
        model = make_model()
        sgd = SGD(model.parameters(), lr=0.0)
        plain = members and hvd.DistributedOptimizer(sgd, process_set=members)
        adasum = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        backward(model)
        adasum.step()
        moved.append([param.detach().clone() for param in model.parameters()])
        del plain
    assert_close(*moved)
    hvd.remove_process_set(alone)


def scenario_settings_that_disagree_are_named() -> None:
    for arguments, why in (
        ({"op": hvd.Sum}, "one of the two does not average"),
        ({"backward_passes_per_step": 2}, "has another backward_passes_per_step"),
        ({"compression": hvd.Compression.fp16}, "compresses gradients"),
        ({"weight": 2.0}, "weighs the ranks"),
        ({"late": hvd.Late()}, "uses gradients of other steps"),
        ({"reduce_in": "step"}, r"reduces in step\(\)"),
    ):
        params = weights(3)
        first = hvd.DistributedOptimizer(SGD(params, lr=0.1))
        second = hvd.DistributedOptimizer(torch.optim.Adam(params), **arguments)
        backward_by_rank(params)
        with raises(f"DistributedOptimizer of SGD .* by the DistributedOptimizer of Adam .*{why}"):
            first.step()
        second.synchronize()
        second.zero_grad()
        hvd.barrier()


def scenario_the_later_one_is_gone() -> None:
    params = weights(3)
    first, second = (hvd.DistributedOptimizer(SGD(params, lr=0.1)) for _ in range(2))
    del second
    gc.collect()
    backward_by_rank(params)
    with raises("which was made later over the same parameters, and which is gone"):
        first.step()


def scenario_weights_of_the_first_one_are_refused() -> None:
    params = weights(3)
    first, second = (hvd.DistributedOptimizer(SGD(params, lr=0.1)) for _ in range(2))
    with raises("by the DistributedOptimizer of SGD .*, so a weight goes to that one"):
        first.weight = 2.0
    del second


def scenario_made_while_gradients_are_on_their_way() -> None:
    params = weights(3)
    first = hvd.DistributedOptimizer(SGD(params, lr=0.1), reduce_in="step")
    backward_by_rank(params)
    with raises(r"between its backward\(\) and its step\(\)"):
        hvd.DistributedOptimizer(SGD(params, lr=0.1))
    first.step()
    check_means(params)


def scenario_the_first_one_ends_first() -> None:
    params = weights(3)
    first: Any = hvd.DistributedOptimizer(SGD(params, lr=0.1))
    second = hvd.DistributedOptimizer(SGD(params, lr=0.1))
    del first
    gc.collect()
    backward_by_rank(params)
    check_means(params)
    second.step()


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init)


test_claims = make_tests(body, sizes(2, 3))
