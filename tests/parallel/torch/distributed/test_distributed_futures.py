"""Futures and works of the backend hvdlite: their callbacks, their memory, and how waits end."""

from __future__ import annotations

import datetime
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.errors import ArgumentError, CollectiveTimeoutError
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.distributed.distributed_worlds import start
from patience import HANG, wait_until

PRELOAD = ("torch._dynamo",)
STEPS = 20
# The places from which operations of one size start in a step.
SCALES = [float(10**place) for place in range(5)]


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore"))
    dist.destroy_process_group()
    return outcomes


def reduced(value: float, count: int = 16) -> Any:
    """Start the sum of a tensor that is `value` on all ranks."""
    return dist.all_reduce(torch.full((count,), value), async_op=True).get_future()


def first(future: Any) -> float:
    return float(future.wait()[0][0])


def in_a_callback(scale: float) -> Any:
    return reduced(scale, 8).then(lambda _: first(reduced(scale)))


def in_a_callback_of_what_has_ended(scale: float) -> Any:
    work = dist.all_reduce(torch.full((8,), scale), async_op=True)
    if hvd.rank() == 0:
        wait_until(work.is_completed, "the operation ends")
    return work.get_future().then(lambda _: first(reduced(scale)))


def in_a_chain(scale: float) -> Any:
    link = reduced(scale, 8).then(lambda _: first(reduced(2 * scale)))
    if hvd.rank() == 0:
        wait_until(link.done, "the first callback ends")
    return link.then(lambda before: (before.wait(), first(reduced(scale)))[1])


def in_two_callbacks(scale: float) -> Any:
    future = reduced(scale, 8)
    future.then(lambda _: first(reduced(3 * scale)))
    return future.then(lambda _: first(reduced(scale)))


def by_done_callback(scale: float) -> Any:
    told = torch.futures.Future()
    reduced(scale, 8).add_done_callback(lambda _: told.set_result(first(reduced(scale))))
    return told


WAYS = (
    in_a_callback,
    in_a_callback_of_what_has_ended,
    in_a_chain,
    in_two_callbacks,
    by_done_callback,
)


def scenario_callbacks_start_operations() -> None:
    for way in WAYS:
        for _ in range(STEPS):
            futures = [way(scale) for scale in SCALES]
            between = [reduced(scale / 10) for scale in SCALES]  # of the same size
            assert [future.wait() for future in futures] == [hvd.size() * s for s in SCALES], way
            assert [first(future) for future in between] == pytest.approx(
                [hvd.size() * scale / 10 for scale in SCALES]
            )


def scenario_callbacks_run_in_the_order_of_the_operations() -> None:
    for _ in range(STEPS):
        order: list[int] = []
        futures = [
            reduced(1.0, 8 + place % 2).then(
                lambda _, place=place, order=order: order.append(place)
            )
            for place in range(6)
        ]
        torch.futures.wait_all(futures)
        assert order == list(range(6))


def scenario_callbacks_that_start_others_without_end() -> None:
    def again(left: int) -> Callable[[Any], float]:
        return lambda _: reduced(float(left)).then(again(left - 1)).wait() if left else 7.0

    assert reduced(1.0).then(again(40)).wait() == 7.0


def scenario_a_callback_waits_for_other_futures() -> None:
    a, b, c = reduced(1.0, 3), reduced(2.0, 7), reduced(3.0, 5)
    of_c = c.then(first)
    of_a = a.then(lambda _: first(b) + of_c.wait())
    assert of_a.wait() == 5.0 * hvd.size()
    assert first(reduced(1.0)) == hvd.size()


def scenario_a_callback_waits_for_the_program() -> None:
    go_on, group = threading.Event(), dist.new_group(backend="hvdlite")
    program = threading.current_thread()  # in which a callback runs if its future has a value
    held = reduced(1.0).then(lambda _: threading.current_thread() is program or go_on.wait(HANG))
    later = dist.all_reduce(torch.ones(3), async_op=True, group=group).get_future()
    assert later.then(first).wait() == hvd.size()
    assert first(reduced(1.0, 9)) == hvd.size()
    go_on.set()
    assert held.wait()
    dist.destroy_process_group(group)


def scenario_other_futures_are_as_ever() -> None:
    told = torch.futures.Future()
    after = told.then(lambda future: future.wait() + 1)
    told.set_result(1)
    assert after.wait() == 2
    both = torch.futures.collect_all([reduced(1.0, 3), reduced(2.0, 5)])
    assert both.then(lambda all_of: len(all_of.wait())).wait() == 2
    failing = reduced(1.0).then(lambda _: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failing.wait()


def scenario_powersgd() -> None:
    """Without a warm start, torch's hook forgets the matrices of all buckets after each bucket."""
    for warm, megabytes in ((True, 0.001), (False, 25)):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 3))
        ddp = DistributedDataParallel(net, bucket_cap_mb=megabytes)
        state = powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, use_error_feedback=warm, warm_start=warm
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(6):
            net.zero_grad()
            ddp(torch.full((4, 12), step + hvd.rank() + 1.0)).square().mean().backward()
            mine = torch.cat([one.grad.reshape(-1) for one in net.parameters()])
            of_first = mine.clone()
            dist.broadcast(of_first, 0)
            assert torch.equal(mine, of_first)


def scenario_ddp_join_divides_by_the_ranks_that_are_left() -> None:
    for by_initial in (False, True):
        net = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        nn.init.ones_(net.module.weight)
        grads = []
        with net.join(divide_by_initial_world_size=by_initial):
            for _ in range(2 if hvd.rank() else 3):
                net.zero_grad()
                net(torch.ones(1, 3)).sum().backward()
                grads.append(float(net.module.weight.grad[0, 0]))
        alone = 1.0 / hvd.size() if by_initial else 1.0
        assert grads == pytest.approx([1.0, 1.0] if hvd.rank() else [1.0, 1.0, alone])


def watched(count: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """Return a tensor, and what tells whether its memory is still there."""
    array = np.ones(count, np.float32)
    return torch.from_numpy(array), weakref.ref(array)


def scenario_memory_of_operations_that_nobody_waits_for() -> None:
    memories = []
    for count in range(20):
        tensor, memory = watched(50_000 + count)
        dist.all_reduce(tensor, async_op=True)
        if hvd.size() > 1:
            if hvd.rank() == 0:
                dist.isend(tensor, 1)
            elif hvd.rank() == 1:
                dist.recv(torch.empty_like(tensor), 0)
        memories.append(memory)
        del tensor
    dist.barrier()
    for _ in range(20):
        dist.barrier()
    gc.collect()
    assert sum(memory() is not None for memory in memories) <= 2


def scenario_a_wait_with_a_timeout_leaves_the_operation() -> None:
    """All but one rank wait in vain, and then with success."""
    group = dist.new_group(backend="hvdlite")
    tensor, late = torch.ones(6), hvd.size() - 1
    if hvd.size() > 1 and hvd.rank() != late:
        work = dist.all_reduce(tensor, async_op=True, group=group)
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match="wait again"):
                work.wait(datetime.timedelta(milliseconds=10))
        assert not work.is_completed()
        dist.barrier()
    else:
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=True, group=group)
    assert work.wait(datetime.timedelta(seconds=HANG))
    assert tensor.tolist() == [hvd.size()] * 6
    dist.destroy_process_group(group)


def scenario_an_error_is_raised_by_each_wait() -> None:
    rank, size = hvd.rank(), hvd.size()
    outputs = list(torch.zeros(2 * size).chunk(size))
    work = dist.all_gather(outputs, torch.ones(1), async_op=True)
    for _ in range(3):
        with pytest.raises(ArgumentError, match="elements arrived"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ArgumentError)
    with pytest.raises(RuntimeError, match="elements arrived"):
        work.get_future().wait()
    assert rank < size


def scenario_a_group_is_destroyed_when_its_operations_have_ended() -> None:
    group, received = dist.new_group(backend="hvdlite"), torch.zeros(3)
    if hvd.rank() == 0:
        for to in range(1, hvd.size()):
            dist.isend(torch.full((3,), 5.0), to, group=group)
        dist.all_reduce(torch.ones(4), async_op=True, group=group)
    else:
        dist.barrier()
        dist.recv(received, 0, group=group)
        dist.all_reduce(torch.ones(4), async_op=True, group=group)
        assert received.tolist() == [5.0] * 3
    if hvd.rank() == 0:
        dist.barrier()
    dist.destroy_process_group(group)


def scenario_an_exception_does_not_wait_for_operations() -> None:
    group = dist.new_group(backend="hvdlite")
    if hvd.rank() == 0 and hvd.size() > 1:
        with pytest.raises(ValueError, match="no such file"):
            try:
                dist.irecv(torch.zeros(3), 1, group=group)
                raise ValueError("no such file")
            finally:
                dist.destroy_process_group(group)
        dist.barrier()
    else:
        dist.barrier()
        dist.destroy_process_group(group)


test_futures = make_tests(body, sizes(1, 3))
