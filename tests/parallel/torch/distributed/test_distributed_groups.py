"""Process groups as torch's tools call them, and reductions of bits."""

from __future__ import annotations

import datetime
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.distributed.distributed_worlds import gloo, start
from patience import HANG

PRELOAD = ("torch._dynamo",)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)


def body() -> dict[str, str]:
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore"))
    dist.destroy_process_group()
    return outcomes


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randint(0, 128, (count,), generator=generator).to(dtype)


def scenario_methods_take_single_tensors() -> None:
    rank, size, group = hvd.rank(), hvd.size(), dist.group.WORLD
    last = size - 1
    whole, mine = torch.zeros(size), torch.full((2,), rank + 1.0)
    parts = [torch.full((2,), float(r)) for r in range(size)]
    reduced_to = mine.clone()
    group.allreduce(reduced_to, dist.ReduceOp.MAX).wait()
    assert reduced_to.tolist() == [size] * 2
    for call in (lambda: group.broadcast(mine, last), lambda: group.broadcast(mine, root=last)):
        mine.fill_(rank + 1)
        call().wait()
        assert mine.tolist() == [size] * 2
    mine.fill_(rank + 1)
    outputs = [torch.zeros(2) for _ in range(size)]
    group.allgather(outputs, mine).wait()
    assert [one.tolist() for one in outputs] == [[r + 1.0] * 2 for r in range(size)]
    outputs = [torch.zeros(2) for _ in range(size)] if rank == last else []
    group.gather(outputs, mine, last).wait()
    assert [one.tolist() for one in outputs] == [[r + 1.0] * 2 for r in range(size)][: len(outputs)]
    group.scatter(mine, parts if rank == last else [], last).wait()
    assert mine.tolist() == [rank] * 2
    group.reduce_scatter(mine, parts, dist.ReduceOp.SUM).wait()
    assert mine.tolist() == [rank * size] * 2
    group.all_gather_single(output=whole, input=torch.ones(1)).wait()
    assert whole.tolist() == [1] * size
    group.barrier(timeout=datetime.timedelta(seconds=HANG)).wait()


def scenario_what_torch_asks_of_a_group() -> None:
    group = dist.new_group(backend="hvdlite", timeout=datetime.timedelta(seconds=77))
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=77)
    backend._set_default_timeout(datetime.timedelta(seconds=78))
    assert backend.options._timeout == datetime.timedelta(seconds=78)
    assert not backend.supports_splitting
    with pytest.raises(RuntimeError, match="cuda"):
        group._get_backend(torch.device("cuda"))
    group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    dist.barrier(group)
    assert group._get_sequence_number_for_group() == before + 1
    assert group.get_group_store() is not None
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=79), group)  # only warns
    dist.destroy_process_group(group)


def scenario_bits_of_whole_numbers() -> None:
    size, rank = hvd.size(), hvd.rank()
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        for dtype in INTEGERS:
            theirs, mine = values(15, dtype), values(15, dtype)
            dist.all_reduce(theirs, op, group=gloo())
            dist.all_reduce(mine, op, async_op=True).wait()
            assert torch.equal(mine, theirs)
            tensor, expected = values(5, dtype), values(5, dtype)
            dist.all_reduce(expected, op)
            dist.reduce(tensor, size - 1, op)
            assert torch.equal(tensor, expected if rank == size - 1 else values(5, dtype))
            whole = values(2 * size, dtype)
            dist.all_reduce(expected := whole.clone(), op)
            part = torch.zeros(2, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole, op)
            assert torch.equal(part, expected[2 * rank :][:2])
    flags = torch.tensor([True, rank == 0, False])
    dist.all_reduce(flags, ReduceOp.BXOR)
    assert flags.tolist() == [size % 2 == 1, True, False]
    parts = [torch.full((r + 1,), 1 << rank) for r in range(size)]
    output = torch.zeros(rank + 1, dtype=torch.int64)
    dist.reduce_scatter(output, parts, ReduceOp.BOR)
    assert output.tolist() == [(1 << size) - 1] * (rank + 1)


test_groups = make_tests(body, sizes(1, 2, 3))
