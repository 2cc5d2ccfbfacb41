"""Sparse tensors of torch.distributed: the backend hvdlite leaves them to gloo, in all_reduce."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.errors import UnsupportedError
from parallel.scenarios import make_tests, on_hosts, run_all, sizes
from parallel.torch.distributed.distributed_worlds import gloo, ours, start

PRELOAD = ("torch._dynamo",)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def body() -> dict[str, str]:
    outcomes = run_all(globals(), start)
    dist.destroy_process_group()
    return outcomes


def coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def of_rows(
    rows: list[int], dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (6, 2)
) -> torch.Tensor:
    """Return a sparse tensor with these rows, whose values tell the rank and the place."""
    count = torch.Size(shape[1:]).numel() * len(rows)
    values = (torch.arange(count) % 3 + hvd.rank() + 1).to(dtype).view(len(rows), *shape[1:])
    indices = torch.tensor([rows], dtype=torch.int64)
    return coo(indices, values, shape)


def forms() -> Iterator[tuple[str, torch.Tensor]]:
    """Give sparse tensors in which ranks have different rows, the same ones, several, and none."""
    rank = hvd.rank()
    yield "own row", of_rows([rank])
    yield "as many rows as the rank says", of_rows(list(range(rank)))
    yield "the same row, and twice", of_rows([1, 1, 3])
    yield "rank 0 alone", of_rows([0, 5] if rank == 0 else [])
    yield "none", of_rows([])
    yield "no rows at all", of_rows([], shape=(0, 2))
    yield "numbers", of_rows([rank, rank], shape=(6,))
    yield "empty rows", of_rows([rank, 0], shape=(6, 0))
    yield "two sparse dimensions", torch.eye(5).roll(rank, 0).to_sparse()
    yield "one of two", (torch.eye(5) * (rank + 1)).to_sparse(1)
    yield "no sparse dimension", coo(torch.zeros(0, 2, dtype=torch.int64), torch.ones(2, 3), (3,))
    for dtype in DTYPES:
        yield str(dtype), of_rows([rank, 0, 0], dtype)


def the_same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    assert mine.layout == theirs.layout == torch.sparse_coo
    facts = [
        (one.shape, one.dtype, one.sparse_dim(), one.is_coalesced(), one._indices().tolist())
        for one in (mine, theirs)
    ]
    return facts[0] == facts[1] and torch.equal(mine._values(), theirs._values())


def scenario_as_gloo_at_once_and_later() -> None:
    for what, tensor in forms():
        theirs = tensor.clone()
        dist.all_reduce(theirs, group=gloo())
        for how in ("at once", "wait", "future"):
            mine = tensor.clone()
            work = dist.all_reduce(mine, group=ours(), async_op=how != "at once")
            if how == "wait":
                assert work.wait()
            elif how == "future":
                (value,) = work.get_future().wait()
                assert the_same(value, theirs)
            assert the_same(mine, theirs), (what, how)


def scenario_ddp() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    net = DistributedDataParallel(table)
    for _ in range(2):
        net(torch.tensor([hvd.rank(), 5])).sum().backward()
    table.weight.grad = None
    net(torch.tensor([hvd.rank(), 5])).sum().backward()
    mean = torch.zeros(6, 2)
    for rank in range(hvd.size()):
        mean[[rank, 5]] += 1.0 / hvd.size()
    assert torch.allclose(table.weight.grad.to_dense(), mean)


def scenario_refused() -> None:
    with pytest.raises(RuntimeError, match="reduction"):
        dist.all_reduce(of_rows([0]), ReduceOp.MAX)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch calls this layout a beta.
        refused = of_rows([0]), torch.eye(3).to_sparse_csr()
    calls: list[Any] = [
        lambda one: dist.broadcast(one, 0),
        lambda one: dist.reduce(one, 0),
        lambda one: dist.all_gather([torch.zeros(6, 2)] * hvd.size(), one),
        lambda one: ours().allreduce([one, torch.ones(2)]),
    ]
    for call in calls:
        for one in refused:
            with pytest.raises(UnsupportedError, match="dense"):
                call(one)
    with pytest.raises(UnsupportedError, match="dense"):
        dist.all_reduce(refused[1])
    dist.barrier()


test_sparse_tensors = make_tests(body, {**sizes(1), **on_hosts([0, 1, 0])})
