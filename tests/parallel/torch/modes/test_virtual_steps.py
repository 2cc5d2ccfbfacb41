"""The loop over steps of virtual ranks: what it gives, refuses and remembers."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.elastic.state import OptimizerStateHandler
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.modes.virtual_models import KINDS, Training

PRELOAD = ("torch._dynamo",)


def tiny(**options: Any) -> tuple[nn.Module, Any, Any]:
    """Make a model, its optimizer with 4 virtual ranks, and a loader of 2 steps."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, virtual_size=4, **options)
    data = [torch.ones(2) * index for index in range(9)]
    sampler = hvd.VirtualBatchSampler(data, batch_size=1, virtual_size=4)
    return model, optimizer, torch.utils.data.DataLoader(data, batch_sampler=sampler)


def train(model: nn.Module, optimizer: Any, loader: Any, epoch: int = 0) -> None:
    for step in optimizer.virtual_steps(loader, epoch, model):
        optimizer.zero_grad()
        for batch in step:
            model(batch).square().mean().backward()
        optimizer.step()


def scenario_each_sample_comes_once_in_an_epoch() -> None:
    _, _, loader = tiny()
    sampler = loader.batch_sampler
    orders = []
    for epoch in range(2):
        order = [sampler.batch(epoch, step, v)[0] for step in range(2) for v in range(4)]
        assert len({*order}) == 8
        orders.append(order)
    assert orders[0] != orders[1]
    assert orders[0] == [sampler.batch(0, step, v)[0] for step in range(2) for v in range(4)]
    assert len(loader) == 8


def scenario_code_between_steps_has_the_same_random_numbers() -> None:
    model, optimizer, loader = tiny()
    drawn = []
    for step in optimizer.virtual_steps(loader, 0, model):
        drawn += [random.random(), float(torch.rand(())), float(np.random.rand())]
        optimizer.zero_grad()
        for batch in step:
            (model(batch).mean() * torch.rand(())).backward()
        optimizer.step()
        drawn += [random.random(), float(torch.rand(())), float(np.random.rand())]
    assert len({*drawn}) == 12
    assert {*hvd.allgather_object(tuple(drawn))} == {tuple(drawn)}


def scenario_workers_of_the_loader_change_nothing() -> None:
    found = []
    for workers in (0, 2):
        training = Training(KINDS[0], workers)
        for _ in training.run(epochs=1):
            pass
        found.append(training.hash())
    assert found[0] == found[1]


def scenario_scaler_skips_an_overflow_everywhere() -> None:
    model, optimizer, loader = tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    for step in optimizer.virtual_steps(loader, 0, model):
        optimizer.zero_grad()
        for number, batch in enumerate(step):
            bad = step.number == 0 and number == 0 and hvd.rank() == 0
            scaler.scale(model(batch).mean() * (float("inf") if bad else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before["weight"]) == (step.number == 0)
    assert scaler.get_scale() == 2.0
    assert optimizer.state_dict()["virtual_ranks"]["step"] == 2


def scenario_misuse_is_refused() -> None:
    model, optimizer, loader = tiny()
    with pytest.raises(hvd.HvdliteError, match="without a loop over a step"):
        optimizer.step()
    steps = optimizer.virtual_steps(loader, 0, model)
    step = next(steps)
    for batch in step:
        with pytest.raises(hvd.HvdliteError, match="call it before the loop"):
            optimizer.zero_grad()
        with pytest.raises(hvd.HvdliteError, match="let the loop end by itself"):
            optimizer.step()
        with pytest.raises(hvd.HvdliteError, match="use one"):
            next(optimizer.virtual_steps(loader, 0, model))
        model(batch).mean().backward()
    with pytest.raises(hvd.HvdliteError, match=r"backward\(\) outside of the loop over a step"):
        model(batch).mean().backward()
    with pytest.raises(hvd.HvdliteError, match="one loop over its batches, not two"):
        next(iter(step))
    optimizer.step()
    with pytest.raises(hvd.HvdliteError, match="without a loop over a step"):
        optimizer.step()
    model.zero_grad()
    step = next(steps)
    batches = iter(step)
    next(batches)
    del batches
    with pytest.raises(hvd.HvdliteError, match="was left before its end"):
        next(steps)
    with pytest.raises(hvd.HvdliteError, match="let the loop end by itself"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, loader, epoch=1)


def scenario_only_the_loop_computes_gradients_and_draws_batches() -> None:
    model, optimizer, loader = tiny()
    workers = torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, num_workers=1, persistent_workers=True
    )
    for epoch in range(2):
        for refused in (loader, workers):
            with pytest.raises(hvd.HvdliteError, match="give evaluation a DataLoader of its own"):
                next(iter(refused))
        optimizer.zero_grad()
        with pytest.raises(hvd.HvdliteError, match=r"backward\(\) outside of the loop over a step"):
            model(torch.ones(2)).sum().backward()
        with pytest.raises(hvd.HvdliteError, match="without a loop over a step"):
            optimizer.step()
        optimizer.zero_grad()
        seen: list[float] = []
        for step in optimizer.virtual_steps(workers, epoch, model):
            optimizer.zero_grad()
            for batch in step:
                with pytest.raises(hvd.HvdliteError, match="DataLoader of its own"):
                    next(iter(workers))
                seen += batch[:, 0].tolist()
                model(batch).square().mean().backward()
            optimizer.step()
        assert len(seen) == len(set(seen)) == 8 / hvd.size()
    del workers, refused


def scenario_what_makes_ranks_differ_is_told() -> None:
    model, optimizer, loader = tiny()
    other = nn.Linear(2, 1)
    both = nn.ModuleList([model, other])
    with pytest.warns(hvd.VirtualRanksWarning, match="2 parameters of the model, first 1.we"):
        next(optimizer.virtual_steps(loader, 0, both))
    with pytest.warns(hvd.VirtualRanksWarning, match="a collective ran inside of the loop"):
        for step in optimizer.virtual_steps(loader, 1, model):
            optimizer.zero_grad()
            for batch in step:
                loss = model(batch).square().mean()
                loss.backward()
                hvd.allreduce(loss.detach(), name="loss")
            optimizer.step()


def scenario_gradients_before_the_loop_are_refused() -> None:
    model, optimizer, loader = tiny()
    with optimizer.no_sync():
        model(torch.ones(2)).sum().backward()
    with pytest.raises(hvd.HvdliteError, match="gradients that are not zero"):
        for step in optimizer.virtual_steps(loader, 0, model):
            next(iter(step))
    optimizer.zero_grad()


def scenario_other_threads_are_refused() -> None:
    model, optimizer, loader = tiny()
    with pytest.raises(hvd.HvdliteError, match="torch has 2 threads"):
        for step in optimizer.virtual_steps(loader, 0, model):
            torch.set_num_threads(2)
            next(iter(step))
    optimizer.zero_grad()
    train(model, optimizer, loader)
    assert torch.get_num_threads() == 1


def scenario_arguments_are_refused() -> None:
    model, optimizer, loader = tiny()
    wide = [range(9)] * 2
    other = hvd.VirtualBatchSampler(wide[0], batch_size=1, virtual_size=2)
    for arguments, what in [
        (([], 0, model), "batch_sampler="),
        ((torch.utils.data.DataLoader(range(9), batch_sampler=other), 0, model), "both the same"),
        ((loader, 0, model, 0), "from 1 on"),
        ((loader, 0, [model]), "ModuleList"),
        ((loader, 0, nn.Linear(2, 1)), "whole"),
    ]:
        with pytest.raises(hvd.ArgumentError, match=what):
            optimizer.virtual_steps(*arguments)
    with pytest.raises(hvd.ArgumentError, match="compute in torch.autocast"):
        half = nn.Linear(2, 1).bfloat16()
        sgd = torch.optim.SGD(half.parameters(), lr=0.1)
        hvd.DistributedOptimizer(sgd, virtual_size=4).virtual_steps(loader, 0, half)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (0, 3, 2.5):
        with pytest.raises(hvd.ArgumentError, match="power of two"):
            hvd.DistributedOptimizer(sgd, virtual_size=size)
    with pytest.raises(hvd.ArgumentError, match="pass virtual_size= to"):
        plain = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        hvd.DistributedOptimizer(plain).virtual_steps(loader, 0, model)
    for options in ({"batch_size": 0}, {"seed": -1}, {"batch_size": 3}):
        with pytest.raises(hvd.ArgumentError, match="VirtualBatchSampler"):
            given = {"batch_size": 1, "virtual_size": 4, **options}
            hvd.VirtualBatchSampler(range(9), **given)


def scenario_ranks_with_other_arguments_are_told() -> None:
    if hvd.size() == 1:
        return
    model, optimizer, loader = tiny()
    with pytest.raises(hvd.MismatchError, match="epoch is . on rank"):
        next(optimizer.virtual_steps(loader, hvd.rank(), model))
    rank = hvd.rank()
    with pytest.raises(hvd.MismatchError, match="threads is . on rank"):
        next(optimizer.virtual_steps(loader, 0, model, threads=1 + rank))
    torch.set_num_threads(1)
    for what, samples, shuffle in (("samples", 9 + rank, True), ("shuffle", 9, rank == 0)):
        model, optimizer, _ = tiny()
        sampler = hvd.VirtualBatchSampler(
            range(samples), batch_size=1, virtual_size=4, shuffle=shuffle
        )
        other = torch.utils.data.DataLoader(range(samples), batch_sampler=sampler)
        with pytest.raises(hvd.MismatchError, match=f"{what} is .* on rank"):
            next(optimizer.virtual_steps(other, 0, model))


def scenario_more_ranks_than_virtual_ranks_are_refused() -> None:
    if hvd.size() == 1:
        return
    model = tiny()[0]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, virtual_size=1)
    sampler = hvd.VirtualBatchSampler(range(9), batch_size=1, virtual_size=1)
    loader = torch.utils.data.DataLoader(range(9), batch_sampler=sampler)
    with pytest.raises(hvd.ArgumentError, match="give virtual_size=2 or more"):
        next(optimizer.virtual_steps(loader, 0, model))


def scenario_join_is_refused() -> None:
    if hvd.size() == 1:
        return
    model, optimizer, loader = tiny()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, loader)
    if hvd.rank() > 0:
        with pytest.raises(hvd.HvdliteError, match="need no join"):
            train(model, optimizer, loader, epoch=1)
        optimizer.zero_grad()
    hvd.join()


def scenario_sparse_gradients_become_dense() -> None:
    data = [torch.tensor(index % 4) for index in range(8)]
    for as_dense in (True, False):
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(table.weight)
        sgd = torch.optim.SGD(table.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, virtual_size=4, sparse_as_dense=as_dense)
        sampler = hvd.VirtualBatchSampler(data, batch_size=1, virtual_size=4)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        if as_dense:
            train(table, optimizer, loader)
        else:
            with pytest.raises(hvd.ArgumentError, match="sparse_as_dense=True"):
                train(table, optimizer, loader)
            optimizer.zero_grad()


def scenario_sync_batch_norm_is_refused() -> None:
    model, optimizer, loader = tiny()
    layers = nn.Sequential(model, hvd.SyncBatchNorm(1, affine=False))
    with pytest.raises(hvd.ArgumentError, match="whose moments virtual_steps"):
        train(layers, optimizer, loader)
    optimizer.zero_grad()


def scenario_state_says_where_training_stands() -> None:
    model, optimizer, loader = tiny()
    for epoch in range(2):
        train(model, optimizer, loader, epoch)
    state = optimizer.state_dict()
    place = state["virtual_ranks"]
    assert (place["virtual_size"], place["seed"], place["epoch"], place["step"]) == (4, 0, 1, 2)
    model, resumed, loader = tiny()
    resumed.load_state_dict(state)
    numbers = [
        [step.number for step in resumed.virtual_steps(loader, epoch, model) if False]
        for epoch in range(2)
    ]
    assert numbers == [[], []]
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.load_state_dict(state)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    with pytest.raises(hvd.ArgumentError, match="give the same virtual_size"):
        resumed.load_state_dict({**state, "virtual_ranks": {**place, "virtual_size": 8}})
    for what, saved in {"seed": 5, "batch_size": 2, "samples": 80, "shuffle": False}.items():
        resumed.load_state_dict({**state, "virtual_ranks": {**place, what: saved}})
        with pytest.raises(hvd.ArgumentError, match=f"give the sampler the same {what}"):
            resumed.virtual_steps(loader, 2, model)
    older = {**place, "machine": {"processor": "of another kind"}}  # hvdlite 0.1 saved it.
    resumed.load_state_dict({**state, "virtual_ranks": older})
    train(model, resumed, loader, epoch=2)


def left_early(training: Training, zero_grad: Any) -> None:
    """Train as `run` does, and leave each step once after its first batch."""
    for epoch in range(2):
        for step in training.optimizer.virtual_steps(training.loader, epoch, training.model):
            zero_grad()
            before = [one.clone() for one in training.model.buffers()]
            for batch in step:
                training.loss_of(batch).backward()
                break
            assert all(map(torch.equal, training.model.buffers(), before))
            zero_grad()
            for batch in step:
                loss = training.loss_of(batch)
                loss.backward()
                step.record(loss)
            training.update()
            training.losses.append(step.loss)


def scenario_a_step_that_was_left_begins_anew() -> None:
    kind = "Conv sgd"
    whole, again = Training(kind), Training(kind)
    for one in (whole, again):
        one.model.register_buffer("constant", torch.ones(3))  # NaN would not equal itself.
    for _ in whole.run():
        pass
    left_early(again, again.optimizer.zero_grad)
    assert again.hash() == whole.hash()


def scenario_buffers_that_a_batch_makes_are_refused() -> None:
    for before, after in ((None, torch.ones(1)), (torch.ones(1), None)):
        model, optimizer, loader = tiny()
        model.register_buffer("mean", before)
        with pytest.raises(hvd.HvdliteError, match="has made a buffer of the model"):
            for step in optimizer.virtual_steps(loader, 0, model):
                for batch in step:
                    model.mean = after
                    model(batch).sum().backward()
        assert before is None or torch.equal(model.mean, before)
        optimizer.zero_grad()


def scenario_a_second_elastic_training_does_not_skip_what_the_first_one_did() -> None:
    model, optimizer, loader = tiny()
    for epoch in (0, 1, 1):  # The third time it is done.
        OptimizerStateHandler(optimizer).reset()  # as `hvd.elastic.run` does
        train(model, optimizer, loader, epoch)
    OptimizerStateHandler(optimizer).reset()
    with pytest.raises(hvd.HvdliteError, match="epoch 0 after epoch 1, .* a new Distributed"):
        train(model, optimizer, loader, epoch=0)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_virtual_steps = make_tests(body, sizes(1, 2))
