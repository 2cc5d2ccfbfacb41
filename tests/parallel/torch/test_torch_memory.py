"""Scripts may drop or replace a tensor's memory while a collective is in flight.

Tensors here are so large that the allocator returns them to the system at once, so that use after
free is a crash. Rank 1 comes late, so that the drop happens in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import raises

PRELOAD = ("torch._dynamo",)
pytestmark = pytest.mark.long
LARGE = 26 << 20  # elements of 4 bytes: more than 100 MB
LATE = 0.05  # seconds


def assign_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(2)


def set_storage(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(2))  # type: ignore[call-overload]


TAKE_AWAY = (assign_data, set_storage)


def large(count: int = LARGE) -> torch.Tensor:
    return torch.full((count,), hvd.rank() + 1.0)


def start(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    if hvd.rank() == 1:
        time.sleep(LATE)
    return call(tensor)


def total() -> float:
    return sum(range(1, hvd.size() + 1))


def same_parts() -> list[torch.Tensor]:
    return [torch.tensor(rank + 1.0) for rank in range(hvd.size())]


# The inputs of each, once passed whole and once taken apart.
NEW_TENSOR: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": lambda x: hvd.allreduce_async(x, op=hvd.Sum),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce_async([x], op=hvd.Sum).first(),
    "broadcast": lambda x: hvd.broadcast_async(x, 1),
    "allgather": hvd.allgather_async,
    "grouped_allgather": lambda x: hvd.grouped_allgather_async([x]).first(),
    "reducescatter": lambda x: hvd.reducescatter_async(x, op=hvd.Sum),
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter_async([x], op=hvd.Sum).first(),
    "alltoall": hvd.alltoall_async,
}
IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce_": lambda x: hvd.allreduce_async_(x, op=hvd.Sum),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_async_([x], op=hvd.Sum),
    "broadcast_": lambda x: hvd.broadcast_async_(x, 1),
}


def scenario_data_that_is_taken_away_is_read_all_the_same() -> None:
    for number, (name, call) in enumerate(NEW_TENSOR.items()):
        tensor = large()
        handle = start(call, tensor)
        TAKE_AWAY[number % 2](tensor)
        result = hvd.synchronize(handle)
        if name in ("allgather", "grouped_allgather", "alltoall"):
            expected = [part.item() for part in same_parts()]
        else:
            expected = [2.0 if name == "broadcast" else total()]
        for part, value in zip(result.tensor_split(len(expected)), expected, strict=True):
            assert part.min() == part.max() == value, name
        del result, handle


def scenario_data_that_is_taken_away_cannot_be_overwritten() -> None:
    for name, call in IN_PLACE.items():
        for take_away in TAKE_AWAY:
            tensor = large()
            handle = start(call, tensor)
            take_away(tensor)
            with raises(r"was given other memory, .*synchronize\(\) the handle first"):
                hvd.synchronize(handle)
            assert torch.equal(tensor, torch.zeros(2)), name
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def scenario_a_handle_that_is_dropped() -> None:
    tensor = large()
    handle = start(IN_PLACE["allreduce_"], tensor)
    del handle, tensor
    hvd.barrier()


def scenario_names_of_many_bytes() -> None:
    for letter, length in (("x", 700), ("層", 100), ("層", 300), ("é", 255), ("🙂", 120)):
        for sparse in (False, True):
            table = nn.Embedding(100, 2, sparse=sparse)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=0.1), [(letter * length, table.weight)]
            )
            for _ in range(3):
                optimizer.zero_grad()
                table(torch.tensor([hvd.rank()])).sum().backward()
                optimizer.step()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_memory = make_tests(body, sizes(2))
