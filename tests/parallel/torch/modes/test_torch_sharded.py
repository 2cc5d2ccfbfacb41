"""`ShardedOptimizer` has the bits of `DistributedOptimizer`, and a share of the state on a rank.

That one has the gradients of one process: see test_torch_backward.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.modes.sharded_models import (
    MAKES,
    Model,
    assert_same_bits,
    bytes_of,
    distributed,
    gradients_in,
    groups_of,
    loss_of,
    sharded,
    train_on,
)
from parallel.torch.small_models import Evaluating, assert_same_everywhere, raises

PRELOAD = ("torch._dynamo",)


def scenario_same_bits_as_unsharded() -> None:
    for make, norm in itertools.product(MAKES.values(), (None, 0.05)):
        ours, theirs = Model(), Model()
        train_on(ours, sharded(make, ours), range(6), norm)
        train_on(theirs, distributed(make, theirs), range(6), norm)
        assert_same_bits(ours, theirs)


def scenario_state_is_divided() -> None:
    model = nn.Sequential(*[nn.Linear(40 + i, 40) for i in range(9)])
    plain = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    plain.step()
    whole = bytes_of(plain)
    optimizer = hvd.ShardedOptimizer(torch.optim.Adam(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    largest = max(2 * param.nbytes for param in model.parameters())
    assert 0 < bytes_of(optimizer) <= 1.1 * (whole / hvd.size() + largest)
    assert hvd.allreduce(torch.tensor(len(optimizer.state)), op=hvd.Sum) == 18


def scenario_parameters_that_are_frozen_thawed_and_added() -> None:
    ours, theirs = Model(), Model()
    added = [nn.Parameter(torch.full((50,), 0.5)) for _ in range(2)]
    optimizers = [sharded(MAKES["AdamW"], ours), distributed(MAKES["AdamW"], theirs)]
    for step in range(6):
        for model in (ours, theirs):
            model.hidden.requires_grad_(step != 2)
            model.frozen.requires_grad_(step > 2)
        for model, optimizer, more in zip((ours, theirs), optimizers, added, strict=True):
            if step == 4:
                optimizer.add_param_group({"params": [more]})
            if step != 2:  # A parameter that is frozen now still has its last gradient.
                optimizer.zero_grad()
            loss = loss_of(model, step, hvd.rank()) + (hvd.rank() + 1) * more.square().sum()
            loss.backward()
            optimizer.step()
        assert_same_bits(ours, theirs)
        assert torch.equal(*added)


def scenario_a_closure_is_evaluated_once() -> None:
    ours, theirs = Model(), Model()
    optimizer, calls = sharded(MAKES["SGD"], ours), []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(ours, 0, hvd.rank())
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    train_on(theirs, distributed(MAKES["SGD"], theirs), range(1))
    assert_same_bits(ours, theirs)
    assert len(calls) == 1 and loss == hvd.allreduce(loss)


def scenario_hooks_and_gradients_are_those_of_all_parameters() -> None:
    model = Model()
    optimizer = sharded(MAKES["SGD"], model)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients_in(model)))
    train_on(model, optimizer, range(1))
    assert seen == [gradients_in(model)] == [5]


def scenario_state_dict_needs_consolidate_after_each_step() -> None:
    model = Model()
    optimizer = sharded(MAKES["AdamW"], model)
    assert optimizer.state_dict()["state"] == {}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train_on(model, optimizer, range(1))
    with raises("which has the state of a share of the parameters; call optimizer.consolidate"):
        optimizer.state_dict()
    with raises("a ShardedOptimizer cannot be pickled"):
        pickle.dumps(optimizer)
    with raises(f"rank {1 - hvd.rank()} sent no state") if hvd.rank() < 2 else nullcontext():
        optimizer.consolidate(to=min(hvd.rank(), 1))
    optimizer.consolidate(to=1)
    if hvd.rank() == 1:
        assert len(optimizer.state_dict()["state"]) == 5
    else:
        with raises("has collected the state on rank 1; call state_dict"):
            optimizer.state_dict()
    train_on(model, optimizer, range(1))
    with raises("which has the state of a share of the parameters"):
        optimizer.state_dict()


def scenario_what_rank_0_loads_goes_to_all_and_training_goes_on() -> None:
    ours, theirs = Model(), Model()
    plain = distributed(MAKES["AdamW"], theirs)
    train_on(theirs, plain, range(3))
    ours.load_state_dict(theirs.state_dict())
    optimizer = sharded(MAKES["AdamW"], ours)
    optimizer.consolidate()
    if hvd.rank() == 0:
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    optimizer.consolidate(to=0)  # What rank 0 has loaded counts.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train_on(ours, optimizer, range(3, 5))
    train_on(theirs, plain, range(3, 5))
    assert_same_bits(ours, theirs)
    assert len(optimizer.state) < len(plain.state)


def scenario_members_of_a_process_set_divide_the_state_among_them() -> None:
    if hvd.size() == 2:
        return
    members = hvd.add_process_set([0, 1])
    model, theirs = Model(), Model()
    optimizer = sharded(MAKES["AdamW"], model, process_set=members)
    train_on(model, optimizer, range(3))
    train_on(theirs, distributed(MAKES["AdamW"], theirs, process_set=members), range(3))
    assert_same_bits(model, theirs)
    optimizer.consolidate(to=0)
    if hvd.rank() != 1:
        assert len(optimizer.state_dict()["state"]) > 4
    hvd.remove_process_set(members)


def scenario_what_cannot_be_sharded_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    sgd = torch.optim.SGD(params, lr=0.1)
    with raises("takes a torch.optim.Optimizer, not a list"):
        hvd.ShardedOptimizer(params)
    with raises("this LBFGS uses all gradients together inside step"):
        hvd.ShardedOptimizer(torch.optim.LBFGS(params))
    with raises("ShardedOptimizer cannot be combined with Evaluating: its eval.* use hvd.Distr"):
        hvd.ShardedOptimizer(Evaluating(params))
    with raises("this SGD clips by the norm of all gradients inside step"):
        hvd.ShardedOptimizer(torch.optim.SGD([{"params": params, "max_grad_norm": 1.0}], lr=0.1))
    with raises("this optimizer is a DistributedOptimizer already"):
        hvd.ShardedOptimizer(hvd.ShardedOptimizer(sgd))


def scenario_other_ranks_need_a_file() -> None:
    model = Model()
    optimizer = sharded(MAKES["AdamW"], model)
    train_on(model, optimizer, range(1))
    optimizer._division.divided_in = (hvd.rank(), *range(hvd.size() + 1))  # as after another init()
    with raises("the ranks have changed since the last step of this ShardedOptimizer"):
        train_on(model, optimizer, range(1))
    optimizer.load_state_dict({**torch.optim.AdamW(groups_of(model)).state_dict(), "state": {}})
    train_on(model, optimizer, range(1))
    assert_same_everywhere(model.table)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_sharded = make_tests(body, on_hosts([0, 0], [0, 1, 1]))


def write_file(folder: str) -> None:
    hvd.init()
    model, other = Model(), Model()
    optimizer, plain = sharded(MAKES["AdamW"], model), distributed(MAKES["AdamW"], other)
    train_on(model, optimizer, range(4))
    train_on(other, plain, range(4))
    optimizer.consolidate(to=0)
    if hvd.rank() == 0:
        state, expected = optimizer.state_dict(), plain.state_dict()
        torch.save((model.state_dict(), state), f"{folder}/file.pt")
        assert state["param_groups"] == expected["param_groups"]
        assert state["state"].keys() == expected["state"].keys()
        for index, values in expected["state"].items():
            assert all(torch.equal(value, state["state"][index][k]) for k, value in values.items())


def read_file(folder: str) -> None:
    hvd.init()
    ours, theirs = Model(), Model()
    optimizer, plain = sharded(MAKES["AdamW"], ours), distributed(MAKES["AdamW"], theirs)
    weights, state = torch.load(f"{folder}/file.pt")
    for model, each in ((ours, optimizer), (theirs, plain)):
        model.load_state_dict(weights)
        each.load_state_dict(copy.deepcopy(state))
    train_on(ours, optimizer, range(4, 7))
    train_on(theirs, plain, range(4, 7))
    assert_same_bits(ours, theirs)


@pytest.mark.long
def test_a_file_of_four_ranks_is_loaded_by_fewer(tmp_path: Path) -> None:
    run_world(4, write_file, str(tmp_path))
    for ranks in (1, 2, 3):
        run_world(ranks, read_file, str(tmp_path))


def join_early() -> str:
    hvd.init()
    model = Model()
    optimizer = sharded(MAKES["AdamW"], model)
    train_on(model, optimizer, range(1))
    if hvd.rank() == 1:
        hvd.join()
        return ""
    with pytest.raises(hvd.HvdliteError) as caught:
        train_on(model, optimizer, range(1, 2))
    hvd.join()
    return str(caught.value)


def test_the_ranks_that_go_on_without_a_joined_rank_get_an_error() -> None:
    texts = [result.value for result in run_world(2, join_early)]
    assert "rank 1, which has joined" in texts[0] and "without hvd.join()" in texts[0]
