"""The methods of a process group that torch's functions and tools call, of any release."""

from __future__ import annotations

import datetime
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.errors import ArgumentError, UnsupportedError
from parallel.scenarios import make_tests, run_all, sizes
from patience import HANG


def group() -> Any:
    return dist.group.WORLD


def body() -> dict[str, str]:
    def start() -> None:
        hvd.init()
        dist.init_process_group("hvdlite", timeout=datetime.timedelta(seconds=HANG))

    outcomes = run_all(globals(), start)
    dist.destroy_process_group()
    return outcomes


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
    no = ("splitting", "coalescing", "shrinking", "reconfigure", "window")
    assert not any(getattr(group, f"supports_{one}") for one in no)
    with pytest.raises(RuntimeError, match="cuda"):
        group._get_backend(torch.device("cuda"))
    group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    dist.barrier(group)
    assert group._get_sequence_number_for_group() == before + 1
    assert group.get_group_store() is not None
    for verb in ("split_group", "new_window", "register_abort_hook", "reconfigure"):
        with pytest.raises(UnsupportedError, match=f"{verb}: process group '.*does not have it; "):
            getattr(group, verb)(None)
    dist.destroy_process_group(group)


def scenario_gather_single() -> None:
    rank, size, options = hvd.rank(), hvd.size(), dist.GatherOptions()
    options.rootRank = size - 1
    for shape in ((size * 2, 3), (size, 2, 3)):
        output = torch.zeros(shape if rank == size - 1 else 0)
        group().gather_single(output, torch.full((2, 3), float(rank)), options).wait()
        if rank == size - 1:
            assert output.flatten().tolist() == [r for r in range(size) for _ in range(6)]
    with pytest.raises(ArgumentError, match="elements") if rank == size - 1 else nullcontext():
        group().gather_single(torch.zeros(size * 7), torch.ones(6), options).wait()


def scenario_timeouts_change() -> None:
    usual, more = datetime.timedelta(seconds=HANG), datetime.timedelta(seconds=7)

    def seconds() -> float:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        found = work._seconds
        work.wait()
        return found

    group().set_timeout(usual + more)
    assert seconds() == HANG + 7
    group().set_timeout(usual)
    for _ in range(2):
        group()._add_ephemeral_timeout(more)
    assert [seconds(), seconds()] == [HANG + 14, HANG]


def scenario_hooks_see_every_operation() -> None:
    seen: list[tuple[Any, ...]] = []

    def before(told: Any) -> None:
        tensors = [one.numel() for one in told.input_tensors], [*map(len, told.output_tensors)]
        seen.append((str(told.name).split(".")[-1], *tensors, told.root, told.op_id))

    def after(told: Any) -> None:
        told.work.wait()
        seen.append((told.op_id,))

    group().register_pre_hook(1, before)
    group().register_post_hook(2, after)
    size, last = hvd.size(), hvd.size() - 1
    group().all_gather_single(torch.zeros(size), torch.ones(1))
    dist.broadcast(torch.ones(2), last)
    group().allreduce_coalesced([torch.ones(2), torch.ones(3)])
    dist.barrier()
    peers = [hvd.rank() ^ 1] if hvd.rank() ^ 1 < size else []
    for peer in peers:
        (dist.send if hvd.rank() < peer else dist.recv)(torch.ones(4), peer)
    group().unregister_pre_hook(1)
    group().unregister_post_hook(2)
    group().unregister_post_hook(3)
    dist.barrier()
    name, sent, got = ("SEND", [4], []) if hvd.rank() % 2 == 0 else ("RECV", [], [4])
    expected = [
        ("ALLGATHER", [1], [size], -1),
        ("BROADCAST", [2], [], last),
        ("ALLREDUCE", [2, 3], [], -1),
        ("BARRIER", [], [], -1),
        *[(name, sent, got, peer) for peer in peers],
    ]
    numbered = [(*one, number) for number, one in enumerate(expected)]
    assert seen == [told for one in numbered for told in (one, one[-1:])]


def scenario_a_nan_is_not_sent() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        careful = dist.new_group(backend="hvdlite")
    rank = hvd.rank()
    text = rf"rank {rank} did not send tensor 0 of allreduce .* \[2, 1\]: it has a NaN"
    with pytest.raises(ArgumentError, match=text):
        dist.all_reduce(torch.tensor([[1.0], [float("nan")]]), group=careful)
    received = torch.full((2,), 1.0 if rank == 0 else float("nan"))
    dist.broadcast(received, 0, group=careful)
    dist.all_reduce(received, group=careful)
    assert received.tolist() == [hvd.size()] * 2
    dist.destroy_process_group(careful)


test_groups = make_tests(body, sizes(1, 3))
