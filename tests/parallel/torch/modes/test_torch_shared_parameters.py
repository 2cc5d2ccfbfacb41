"""`ShardedOptimizer(share_parameters=True)`: one copy of the parameters and the state per host."""

from __future__ import annotations

import io
import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from hvdlite import basics
from parallel.deaths import die, seconds_since_death
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.modes.sharded_models import (
    MAKES,
    Model,
    assert_same_bits,
    distributed,
    sharded,
    train_on,
)
from parallel.torch.small_models import raises
from patience import HANG

PRELOAD = ("torch._dynamo",)


def ranks_of_host() -> list[int]:
    hosts = basics.current_world().host_of
    return [rank for rank in range(hvd.size()) if hosts[rank] == hosts[hvd.rank()]]


def memory_of(param: torch.Tensor) -> str:
    """Return the line of /proc/self/maps that has the parameter."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= param.data_ptr() < end:
            return line
    raise AssertionError("the parameter lies nowhere")


def scenario_same_bits_as_unsharded() -> None:
    for make, norm in itertools.product(MAKES.values(), (None, 0.05)):
        ours, theirs = Model(), Model()
        train_on(ours, sharded(make, ours, share_parameters=True), range(6), norm)
        train_on(theirs, distributed(make, theirs), range(6), norm)
        assert_same_bits(ours, theirs)


def scenario_every_optimizer_of_torch_gives_the_bits_of_unshared_parameters() -> None:
    # LBFGS searches with all parameters, and SparseAdam has a scenario of its own.
    optim = torch.optim
    left_out = (optim.Optimizer, optim.LBFGS, optim.SparseAdam)
    kinds = [one for one in vars(optim).values() if isinstance(one, type) and one not in left_out]
    assert len(kinds) > 10
    for kind in kinds:
        trained = []
        for share in ({}, {"share_parameters": True}):
            torch.manual_seed(0)
            # Muon takes matrices alone.
            model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4)))
            plain = kind(model.parameters(), lr=0.05)
            make = hvd.ShardedOptimizer if share else hvd.DistributedOptimizer
            optimizer = make(plain, model.named_parameters(), **share)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((2, 5), 1.0 + hvd.rank() + step)).square().mean().backward()
                optimizer.step()
            trained.append([*model.parameters()])
        assert all(map(torch.equal, *trained)), kind
        torch.manual_seed(0)
        assert not torch.equal(trained[0][0], nn.Linear(5, 5, bias=False).weight), kind


def scenario_a_host_has_one_copy_of_parameters_and_state() -> None:
    model = Model()
    optimizer = sharded(MAKES["AdamW"], model, share_parameters=True)
    train_on(model, optimizer, range(2))
    moved = [
        param for param in model.parameters() if param.requires_grad and param.grad is not None
    ]
    assert moved
    inodes = {memory_of(param).split()[4] for param in moved}
    assert len(inodes) == 1 and "hvdlite parameters" in memory_of(moved[0])
    told = hvd.allgather_object((ranks_of_host(), inodes, len(optimizer.state)))
    for ranks in {tuple(one[0]) for one in told}:
        assert len({frozenset(told[rank][1]) for rank in ranks}) == 1
        assert sum(told[rank][2] for rank in ranks) == len(moved)
    assert len({frozenset(one[1]) for one in told}) == len({tuple(one[0]) for one in told})


def scenario_unusual_strides_and_empty_parameters() -> None:
    weights = [torch.arange(24.0).view(2, 3, 4), torch.empty(0, 3), torch.tensor(1.0)]
    models = []
    for make in (hvd.DistributedOptimizer, hvd.ShardedOptimizer):
        params = [nn.Parameter(one.clone()) for one in weights]
        params += [nn.Parameter(weights[0].clone().permute(2, 0, 1))]
        params += [nn.Parameter(torch.zeros(2, 8)[:, ::2])]  # It has gaps.
        params += [nn.Parameter(torch.ones(3, dtype=torch.complex64))]
        share = {"share_parameters": True} if make is hvd.ShardedOptimizer else {}
        optimizer = make(torch.optim.AdamW(params, lr=0.1), **share)
        for _ in range(3):
            optimizer.zero_grad()
            sum((hvd.rank() + 1 + param.abs()).square().sum() for param in params).backward()
            optimizer.step()
        models.append(params)
    for ours, theirs in zip(*models, strict=True):
        assert torch.equal(ours, theirs) and ours.shape == theirs.shape
    assert models[1][3].stride() == models[0][3].stride()


def scenario_an_optimizer_that_gives_parameters_new_memory() -> None:
    class Replacing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data = param.data - group["lr"] * param.grad

    ours, theirs = Model(), Model()
    optimizer = hvd.ShardedOptimizer(Replacing(ours.parameters(), lr=0.1), share_parameters=True)
    train_on(ours, optimizer, range(4))
    train_on(theirs, hvd.DistributedOptimizer(Replacing(theirs.parameters(), lr=0.1)), range(4))
    assert_same_bits(ours, theirs)


def scenario_new_memory_between_steps_is_shared_again() -> None:
    ours, theirs = Model(), Model()
    pairs = [(ours, sharded(MAKES["SGD"], ours, share_parameters=True))]
    pairs += [(theirs, distributed(MAKES["SGD"], theirs))]
    for model, optimizer in pairs:
        train_on(model, optimizer, range(2))
        for param in model.parameters():
            param.data = param.data.clone()
        train_on(model, optimizer, range(2, 4))
    assert_same_bits(ours, theirs)


def scenario_changes_outside_a_step_are_found() -> None:
    changes = {
        "in place": lambda param: param.mul_(0.5),
        "by data": lambda param: param.data.add_(1.0),
        "as NaN": lambda param: param.fill_(float("nan")),
    }
    for change in changes.values():
        model = Model()
        optimizer = sharded(MAKES["SGD"], model, share_parameters=True)
        train_on(model, optimizer, range(1))
        hvd.barrier()
        if hvd.rank() == hvd.size() - 1:
            with torch.no_grad():
                change(model.hidden.weight)
        with raises(f"rank {hvd.size() - 1} has found that hidden.weight changed outside step"):
            train_on(model, optimizer, range(1, 2))


def scenario_unshared_parameters_can_be_changed() -> None:
    ours, theirs = Model(), Model()
    pairs = [(ours, sharded(MAKES["AdamW"], ours, share_parameters=True))]
    pairs += [(theirs, sharded(MAKES["AdamW"], theirs))]
    for model, optimizer in pairs:
        for steps in (range(2), range(2, 4)):
            optimizer.unshare_parameters()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
            train_on(model, optimizer, steps)
    assert_same_bits(ours, theirs)
    assert "hvdlite parameters" in memory_of(ours.hidden.weight)
    pairs[0][1].unshare_parameters()
    assert "hvdlite parameters" not in memory_of(ours.hidden.weight)


def scenario_a_file_has_the_state_of_all_parameters() -> None:
    ours, theirs = Model(), Model()
    optimizer = sharded(MAKES["AdamW"], ours, share_parameters=True)
    plain = distributed(MAKES["AdamW"], theirs)
    train_on(ours, optimizer, range(3))
    train_on(theirs, plain, range(3))
    for to in {0, hvd.size() - 1}:
        optimizer.consolidate(to=to)
        if hvd.rank() == to:
            found, expected = optimizer.state_dict(), plain.state_dict()
            assert found["state"].keys() == expected["state"].keys()
            for index, values in expected["state"].items():
                assert all(torch.equal(found["state"][index][k], v) for k, v in values.items())
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    parameters = sum(param.nbytes for param in ours.parameters())
    assert file.tell() < 2 * parameters + 8192, "the file has memory of several parameters"


def scenario_a_second_world() -> None:
    ours, theirs = Model(), Model()
    pairs = [(ours, sharded(MAKES["AdamW"], ours, share_parameters=True))]
    pairs += [(theirs, distributed(MAKES["AdamW"], theirs))]
    for steps in (range(2), range(2, 4)):
        for model, optimizer in pairs:
            train_on(model, optimizer, steps)
        hvd.shutdown()
        hvd.init()
    assert_same_bits(ours, theirs)
    assert "hvdlite parameters" in memory_of(ours.hidden.weight)


def scenario_ranks_with_other_parameters_get_an_error() -> None:
    model = Model()
    optimizer = sharded(MAKES["SGD"], model, share_parameters=True)
    train_on(model, optimizer, range(1))
    optimizer._exchange.params = optimizer._exchange.params[hvd.rank() :]
    with raises(r"rank \d with \d+ and rank \d with \d+; make, freeze, thaw"):
        optimizer._exchange.run(lambda: None)


def scenario_memory_that_one_rank_cannot_open_is_an_error_everywhere() -> None:
    model = Model()
    optimizer = sharded(MAKES["SGD"], model, share_parameters=True)
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == hvd.size() - 1:
            patch.setattr(os, "fstat", lambda _: Path("/").stat())
        with raises(f"rank {hvd.size() - 1} cannot map .* bytes that the ranks of its host share"):
            train_on(model, optimizer, range(1))


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_shared_parameters = make_tests(body, on_hosts([0, 0], [0, 1, 1]))


def die_in_an_update(path: str) -> str:
    class Dying(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            if hvd.rank() == 1 and done:
                die(path)

    hvd.init()
    model, done = Model(), []
    optimizer = hvd.ShardedOptimizer(Dying(model.parameters(), lr=0.1), share_parameters=True)
    train_on(model, optimizer, range(2))
    done.append(True)
    with pytest.raises(hvd.HvdliteError) as caught:
        train_on(model, optimizer, range(2, 3))
    assert seconds_since_death(path) < HANG
    return str(caught.value)


def test_a_rank_that_dies_in_an_update_is_named(tmp_path: Path) -> None:
    survivor, victim = run_world(2, die_in_an_update, str(tmp_path / "death"), expect_failure=True)
    assert victim.returncode == -signal.SIGKILL
    assert "rank 1" in survivor.value, survivor
