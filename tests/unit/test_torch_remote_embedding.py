"""RemoteEmbedding: rows of a table that only servers hold, pulled and pushed by batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from hvdlite.errors import ArgumentError
from hvdlite.torch.parameter_server.group import Group
from hvdlite.torch.remote_embedding import RemoteEmbedding
from parameter_servers import Servers, storage_of

ROWS, WIDTH = 5000, 32  # large enough to be divided


class Worker:
    """What RemoteEmbedding needs of a group."""

    def __init__(self, servers: Servers) -> None:
        self.client = servers.client()


def worker_of(servers: Servers) -> Group:
    return cast(Group, Worker(servers))


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.5)


def batches() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(ROWS, (4, 3), generator=draws) for _ in range(6)]


@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_has_the_bits_of_an_embedding_of_its_own(servers: int) -> None:
    with Servers(servers, storage_of(sgd)) as service:
        table = RemoteEmbedding(ROWS, WIDTH, worker_of(service), seed=5)
        with torch.no_grad():
            first = table(torch.arange(ROWS))
        own = torch.nn.Embedding(ROWS, WIDTH, _weight=first.clone(), sparse=True)
        optimizer = sgd(own.parameters())
        for batch in batches():
            table(batch).pow(3).sum().backward()
            optimizer.zero_grad()
            own(batch).pow(3).sum().backward()
            optimizer.step()
        with torch.no_grad():
            assert torch.equal(table(torch.arange(ROWS)), own.weight)
        assert table.clock == 6
    assert 0.9 < float(first.std()) < 1.1 and len(first.unique()) > ROWS


def test_first_values_depend_on_the_seed_alone() -> None:
    found = []
    for servers, seed in ((1, 7), (3, 7), (1, 8)):
        with Servers(servers, storage_of(sgd)) as service, torch.no_grad():
            table = RemoteEmbedding(ROWS, WIDTH, worker_of(service), seed=seed, std=0.1)
            found.append(table(torch.tensor([0, 4095, 4096, 4999, 4095])))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[0][1], found[0][4])


def test_tables_are_counted_and_two_workers_share_them() -> None:
    with Servers(1, storage_of(sgd), workers=2) as service:
        groups = [worker_of(service) for _ in range(2)]
        ours, other = (RemoteEmbedding(4, 2, group, std=0.0) for group in groups)
        second = RemoteEmbedding(4, 3, groups[0])
        assert (ours.name, other.name, second.name) == ("embedding.0",) * 2 + ("embedding.1",)
        ours(torch.tensor([[1], [1], [3]])).sum().backward()
        expected = torch.tensor([[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [-0.5, -0.5]])
        assert torch.equal(other(torch.arange(4)).detach(), expected)
        assert other(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 2)
        assert "4, 2, name='embedding.0'" in str(ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows=0 is not a number from 1 on"),
        ({"width": 1.5}, "width=1.5 is not a number from 1 on"),
        ({"std": -1.0}, "std=-1.0 is not a standard deviation"),
        ({"dtype": torch.int64}, "dtype=torch.int64: servers hold float16"),
        ({"staleness": -1}, "staleness=-1 is not None, 0 or a number"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RemoteEmbedding(**{"rows": 4, "width": 2, "group": None, **arguments})


def test_numbers_that_are_not_rows() -> None:
    with Servers(1, storage_of(sgd)) as service:
        table = RemoteEmbedding(4, 2, worker_of(service))
        with pytest.raises(ArgumentError, match="has the rows 0 to 3, and a batch has the"):
            table(torch.tensor([1, 4]))
        with pytest.raises(ArgumentError, match="takes numbers of rows as integers, not as torch"):
            table(torch.tensor([1.0]))


def pushed(scale: float, overflow: bool = False, **arguments: Any) -> list[float]:
    """Return row 1 of a table of zeros after a step of SGD with rate 1 on the sum of the row."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    given = {name: scaler if value == "this" else value for name, value in arguments.items()}
    with Servers(1, storage_of(lambda params: torch.optim.SGD(params, lr=1.0))) as service:
        table = RemoteEmbedding(4, 2, worker_of(service), std=0.0, **given)
        factor = float("inf") if overflow else 1.0
        scaler.scale(table(torch.tensor([1])).sum() * factor).backward()
        with torch.no_grad():
            row: list[float] = table(torch.tensor([1]))[0].tolist()
            return row


def test_scale_of_the_loss_is_taken_off() -> None:
    assert pushed(1024.0, scaler="this") == [-1.0, -1.0]


def test_rows_that_overflow_are_not_pushed() -> None:
    assert pushed(1024.0, overflow=True, scaler="this") == [0.0, 0.0]


def test_scaler_that_nobody_has_told_of_is_refused() -> None:
    with pytest.raises(ArgumentError, match="give it scaler=, or scaler=False where it scales"):
        pushed(1024.0)
    assert pushed(1024.0, scaler=False) == [-1024.0, -1024.0]
