"""`hvd.DistributedDataParallel` trains as torch's class of this name does over gloo."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlite.torch as hvd
from harness import RankResult, run_world
from parallel.scenarios import check, names_in, run_all
from parallel.torch.optimizer.test_torch_like_ddp import STEPS, data, loss_of
from parallel.torch.small_models import assert_close, assert_same_everywhere, inputs, raises

Wrap = Callable[..., Any]
PRELOAD = ("torch._dynamo",)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers).double()


class Branching(nn.Module):
    """Leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(hvd.rank())  # the first rank's parameters count
        self.used, self.rare, self.never = (nn.Linear(3, 1).double() for _ in range(3))

    def forward(self, x: torch.Tensor, rare: bool = False) -> Any:
        return self.used(x) + (self.rare(x) if rare else 0)


def plain(wrap: Wrap) -> Iterator[Any]:
    """Train with batch normalization, clipping and accumulation, from different beginnings."""
    model = wrap(make_model(seed=hvd.rank()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = loss_of(model, data(step, part)) / 3
                loss.backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss
    yield from model.state_dict().values()


def without_buffers(wrap: Wrap) -> Iterator[Any]:
    """Let every rank keep its moments, and accumulate without declaring it."""
    with warnings.catch_warnings():
        # torch has a different name for it since 2.13.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        model = wrap(make_model(), broadcast_buffers=False, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        model.zero_grad()
        for part in range(2):
            loss = loss_of(model, data(step, part))
            loss.backward()
        optimizer.step()
        yield loss
    yield from model.state_dict().values()


def unused(wrap: Wrap) -> Iterator[Any]:
    """Use a layer on one rank, or on none."""
    model = wrap(Branching(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = data(step)
        loss = (model(x, rare=step % 2 == 1 and hvd.rank() == 0) - x.sum(1, keepdim=True)).square()
        loss.mean().backward()
        optimizer.step()
        yield loss
    yield from model.state_dict().values()


def compare(script: Callable[[Wrap], Iterator[Any]]) -> None:
    ours = [x.detach().clone().double() for x in script(hvd.DistributedDataParallel)]
    theirs = [x.detach().clone().double() for x in script(nn.parallel.DistributedDataParallel)]
    assert_close(ours, theirs)


def scenario_plain() -> None:
    compare(plain)


def scenario_without_buffers() -> None:
    compare(without_buffers)


def scenario_unused_parameters() -> None:
    compare(unused)


def scenario_state_dict() -> None:
    ours = hvd.DistributedDataParallel(make_model(hvd.rank()), device_ids=None, static_graph=True)
    theirs = nn.parallel.DistributedDataParallel(make_model())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.module.state_dict()) == [k[7:] for k in ours.state_dict()]
    assert_same_everywhere(ours)


def scenario_evaluation_on_one_rank() -> None:
    model = hvd.DistributedDataParallel(make_model())
    if hvd.rank() == 0:
        model.eval()
        model(data(0))
        model.train()
    loss_of(model, data(0)).backward()


def scenario_refusals() -> None:
    model = make_model()
    wrapped = hvd.DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for again in (wrapped, nn.Sequential(wrapped)):
        with raises("is a DistributedDataParallel already"):
            hvd.DistributedDataParallel(again)
    with raises("is a DistributedDataParallel already, or a part of it is"):
        hvd.DistributedDataParallel(model)
    for op in (hvd.Average, hvd.Adasum):
        with raises("step with the plain optimizer"):
            hvd.DistributedOptimizer(sgd, op=op)
    with raises("takes a model, not a SGD"):
        hvd.DistributedDataParallel(sgd)
    with raises("device_ids must name one device"):
        hvd.DistributedDataParallel(make_model(), device_ids=[0, 1])
    with raises("use process_set="):
        hvd.DistributedDataParallel(make_model(), process_group=dist.group.WORLD)
    other = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    with raises("leave one of the two out"):
        hvd.DistributedDataParallel(other)
    del optimizer
    hvd.DistributedDataParallel(other)


def scenario_a_backward_that_raised() -> None:
    model = hvd.DistributedDataParallel(Branching(), bucket_cap_mb=1e-6)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("mine")

    for attempt in range(2):
        model.zero_grad()
        x = inputs().double()
        with contextlib.suppress(KeyError):
            middle = model.module.used(x)
            if attempt == 0:
                middle.register_hook(fail)
            (model(x, rare=True) + middle).sum().backward()
    expected = sum(inputs(rank).double().sum(0) for rank in range(hvd.size())) / hvd.size()
    assert torch.allclose(model.module.rare.weight.grad[0], expected)


def scenario_frozen_on_one_rank() -> None:
    inner = make_model()
    inner.get_parameter("0.weight").requires_grad_(hvd.rank() != 1)
    model = hvd.DistributedDataParallel(inner)
    with raises("'0.weight' is trained on rank.* and not on rank 1"):
        loss_of(model, data(0)).backward()


def scenario_process_set() -> None:
    if hvd.size() == 2:
        return
    pair = hvd.add_process_set([1, 2])
    model = hvd.DistributedDataParallel(make_model(hvd.rank()), process_set=pair)
    loss_of(model, data(0)).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    all_flat = hvd.allgather(flat.unsqueeze(0))
    assert torch.equal(all_flat[1], all_flat[2])
    assert not torch.equal(all_flat[0], all_flat[1])


def body(folder: str) -> dict[str, str]:
    torch.set_num_threads(1)
    hvd.init()
    store = dist.FileStore(f"{folder}/store", hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    outcomes = run_all(globals(), lambda: None)
    dist.destroy_process_group()
    return outcomes


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest) -> Iterator[list[RankResult]]:
    with tempfile.TemporaryDirectory() as folder:
        yield run_world(request.param, body, folder, env={"GLOO_SOCKET_IFNAME": "lo"})


@pytest.mark.parametrize("name", names_in(globals()))
def test_data_parallel(results: list[RankResult], name: str) -> None:
    check(results, name)
