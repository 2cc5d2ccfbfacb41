"""Parameter servers with torch: threads of one process, over real sockets."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdlite.errors import ArgumentError, MismatchError, RankFailedError, UndividedRateWarning
from hvdlite.parameter_server import server
from hvdlite.parameter_server.tensors import Gradient, TensorSpec
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.torch.parameter_server import Group, Replica, TorchStorage
from hvdlite.torch.wrapping import Wrapping
from parameter_servers import Servers, storage_of
from patience import Stopwatch, wait_until


def model_of(seed: int = 0, width: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
    )


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(16, 4, generator=generator)).square().mean()


class Wrapped(Wrapping, torch.optim.SGD):
    """What hvd.DistributedOptimizer makes of an optimizer."""


def wrapped(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.__class__ = Wrapped
    return optimizer


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torch cut no tensor by threads, and servers wait less for successors of the dead."""
    monkeypatch.setattr(server, "_LINGER_SECONDS", 0.2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same_parameters(one: torch.nn.Module, other: torch.nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(*pair) and bool(pair[0].isfinite().all()) for pair in pairs)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("servers", "width"), [(1, 8), (3, 20000)])
def test_one_worker_trains_to_the_bits_of_plain_training(
    kind: str, servers: int, width: int
) -> None:
    plain, ours = model_of(1, width), model_of(1, width)
    optimizer = OPTIMIZERS[kind](plain.parameters())
    with Servers(servers, storage_of(OPTIMIZERS[kind])) as running:
        replica = Replica(running.client(), ours.named_parameters())
        for step in range(5):
            for model in (plain, ours):
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            assert_same_parameters(plain, ours)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_travel_as_rows(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(params, lr=0.5)
        return optimizer

    pushed: list[int] = []
    apply = TorchStorage.apply

    def count(storage: TorchStorage, gradients: Sequence[Gradient]) -> None:
        pushed.extend(len(one.values) for one in gradients)
        apply(storage, gradients)

    monkeypatch.setattr(TorchStorage, "apply", count)
    plain = torch.nn.Embedding(3000, 64, sparse=True)
    ours = torch.nn.Embedding(3000, 64, sparse=True)
    ours.load_state_dict(plain.state_dict())
    optimizer = make(list(plain.parameters()))
    with Servers(2, storage_of(make)) as running:
        replica = Replica(running.client(), ours.named_parameters())
        for step in range(3):
            words = torch.randint(0, 3000, (40,), generator=torch.Generator().manual_seed(step))
            for model in (plain, ours):
                model(words).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            assert_same_parameters(plain, ours)
    assert len(pushed) == 3 and max(pushed) <= 40 * 64 * 4


def train(replica: Replica, model: torch.nn.Module, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        replica.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("servers", [1, 3])
def test_servers_go_on_from_their_checkpoint(kind: str, servers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "ps.ckpt")
    whole = model_of(2, 20000)
    with Servers(servers, storage_of(OPTIMIZERS[kind])) as running:
        train(Replica(running.client(), whole.named_parameters()), whole, range(4))
    for steps in (range(2), range(2, 4)):
        cut = model_of(2 + steps.start, 20000)  # Later values come from the checkpoint.
        with Servers(servers, storage_of(OPTIMIZERS[kind]), save=path) as running:
            replica = Replica(running.client(), cut.named_parameters())
            assert replica.clock == steps.start
            train(replica, cut, steps)
    assert_same_parameters(whole, cut)
    files = {f"ps.ckpt.{index}-of-{servers}" for index in range(servers)}
    assert {one.name for one in tmp_path.iterdir()} == files


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "ps.ckpt")
    with Servers(1, storage_of(OPTIMIZERS["sgd"]), save=path) as running:
        model = model_of()
        train(Replica(running.client(), model.named_parameters()), model, range(1))
    message = r"of another model.*'0.weight' is float32\[9, 4\]"
    with (
        Servers(1, storage_of(OPTIMIZERS["sgd"]), save=path) as running,
        pytest.raises(MismatchError, match=message),
    ):
        Replica(running.client(), model_of(width=9).named_parameters())


def test_a_worker_that_leaves_or_dies_is_not_waited_for() -> None:
    make = OPTIMIZERS["sgd"]
    with Servers(2, storage_of(make), workers=3) as running:
        clients = [running.client() for _ in range(3)]
        models = [model_of() for _ in clients]
        replicas = [
            Replica(client, model.named_parameters(), staleness=0)
            for client, model in zip(clients, models, strict=True)
        ]
        ends = []

        def leave() -> None:
            wait_until(lambda: running.servers[0].report().version > 0, "a push")
            time.sleep(0.2)  # The worker that pushed waits for those that did not.
            ends.append(Stopwatch())
            clients[1].close(goodbye=True)
            clients[2].close(goodbye=False)

        leaving = threading.Thread(target=leave)
        leaving.start()
        train(replicas[0], models[0], range(3))
        assert ends and ends[0].seconds() < 1
        leaving.join()
        late = model_of()
        newcomer = Replica(running.client(), late.named_parameters(), staleness=1)
        assert newcomer.clock == 3
        train(newcomer, late, range(1))
        assert not clients[0].report().servers[0].workers[3].live


def test_a_server_that_dies_is_named_with_its_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "ps.ckpt")
    with Servers(2, storage_of(OPTIMIZERS["sgd"]), save=path, save_every=0.01) as running:
        model = model_of()
        replica = Replica(running.client(), model.named_parameters())
        train(replica, model, range(2))
        wait_until((tmp_path / "ps.ckpt.1-of-2").exists, "the checkpoint of server 1")
        train(replica, model, range(1))  # The answer has the number of the checkpoint.
        running.servers[1].stop()
        running.threads[1].join()
        with pytest.raises(RankFailedError, match="parameter server 1 died.*ps.ckpt.1-of-2") as e:
            train(replica, model, range(2))
        assert e.value.failed_rank == 1
        with pytest.raises(RankFailedError, match="parameter server 1 died"):
            replica.step()


BAD_ARGUMENTS = [
    ({"staleness": -1}, "staleness=-1 is not"),
    ({"push_every": 0}, "push_every=0 is not"),
    ({"pull_every": True}, "pull_every=True is not"),
]


def test_what_cannot_be_meant_is_refused() -> None:
    model = model_of()
    with Servers(1, storage_of(OPTIMIZERS["sgd"])) as running:
        client = running.client()
        for arguments, message in BAD_ARGUMENTS:
            with pytest.raises(ArgumentError, match=message):
                Replica(client, model.named_parameters(), **arguments)
        with pytest.raises(ArgumentError, match="running_mean' is not a parameter.*BatchNorm"):
            Replica(client, model.state_dict(keep_vars=True).items())
        with pytest.raises(ArgumentError, match="names and parameters"):
            Replica(client, model.parameters())
        with pytest.raises(ArgumentError, match="servers hold float16"):
            Replica(client, [("a", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
        replica = Replica(client, model.named_parameters())
        with pytest.raises(ArgumentError, match="found no gradient"):
            replica.step()
        other = running.client()
        with pytest.raises(MismatchError, match="tensor '0.weight' is float32.9, 4. here and"):
            Replica(other, model_of(width=9).named_parameters())
        train(replica, model, range(1))  # The mistake of one worker does not concern another.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: None, "returns a torch optimizer"),
        (lambda params: torch.optim.SGD(params[:1], lr=0.1), "not exactly the 6"),
        (wrapped, "return the plain torch.optim"),
    ],
)
def test_an_optimizer_that_a_server_cannot_use_is_refused(make: Any, message: str) -> None:
    with Servers(1, storage_of(make)) as running, pytest.raises(ArgumentError, match=message):
        Replica(running.client(), model_of().named_parameters())


def test_a_gradient_that_cannot_be_applied_changes_nothing() -> None:
    make = OPTIMIZERS["sgd"]
    with Servers(1, storage_of(make, check_finite=True), workers=2) as running:
        good, bad = model_of(), model_of()
        steady = Replica(running.client(), good.named_parameters())
        broken = Replica(running.client(), bad.named_parameters())
        loss_of(bad, 0).backward()
        bad[0].weight.grad[1, 2] = math.nan
        with pytest.raises(ArgumentError, match="worker|gradient of '0.weight' has a NaN"):
            broken.step()
        steady.pull()
        assert_same_parameters(good, model_of())
    words = torch.nn.Embedding(10, 4, sparse=True)
    with Servers(1, storage_of(OPTIMIZERS["adam"])) as running:
        replica = Replica(running.client(), words.named_parameters())
        words(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ArgumentError, match="Adam cannot apply this push.*sparse"):
            replica.step()


@pytest.mark.parametrize(("divided", "count"), [(True, 0), (False, 1)])
def test_a_momentum_at_an_undivided_rate_is_warned_of(divided: bool, count: int) -> None:
    group = Group.__new__(Group)
    group.index, group.knows_workers = 0, False
    group._environment = WorkerEnvironment(size=6, servers=2)

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1 / (group.workers if divided else 1), momentum=0.9)

    tensors = [TensorSpec("w", "float32", (2,))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            group._warn_of_the_rate(TorchStorage(tensors, make))
    assert [one.category for one in caught] == [UndividedRateWarning] * count
