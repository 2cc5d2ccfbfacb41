"""Where collectives of torch.distributed write: to the tensors of the caller, wherever they lie."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.errors import ArgumentError
from parallel.scenarios import make_tests, on_hosts, run_all, sizes

PRELOAD = ("torch._dynamo",)

# Their names since torch 2.13, and before.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def body() -> dict[str, str]:
    outcomes = run_all(globals(), start)
    dist.destroy_process_group()
    return outcomes


def start() -> None:
    hvd.init()
    dist.init_process_group("hvdlite")


def ours() -> Any:
    return dist.group.WORLD


def own_values(count: int = 3) -> torch.Tensor:
    return torch.arange(float(count)) + 10 * hvd.rank()


def of_all(count: int = 3) -> torch.Tensor:
    return torch.cat([torch.arange(float(count)) + 10 * rank for rank in range(hvd.size())])


def works() -> bool:
    """Use the group once more, as after an error that concerns one rank."""
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist() == [hvd.size()] * 2


def scenario_outputs_of_any_place() -> None:
    size = hvd.size()
    expected = [part.tolist() for part in of_all().chunk(size)]
    places: list[Callable[[], list[torch.Tensor]]] = [
        lambda: list(torch.empty(3 * size).chunk(size)),
        lambda: list(torch.empty(3 * size).chunk(size))[::-1],
        lambda: [torch.empty(3) for _ in range(size)],
        lambda: [torch.empty(3, 2).t()[0] for _ in range(size)],
        lambda: list(torch.empty(3, size).t()),
    ]
    for make in places:
        for asynchronous in (False, True):
            outputs = make()
            work = dist.all_gather(outputs, own_values(), async_op=asynchronous)
            if work is not None:
                work.wait()
            assert [output.tolist() for output in outputs] == expected
            outputs = make()
            dist.all_to_all(outputs, [own_values() for _ in range(size)])
            assert [output.tolist() for output in outputs] == expected


def scenario_inputs_that_are_parts_of_the_output() -> None:
    rank, size = hvd.rank(), hvd.size()
    for count in (3, 100_000):
        whole = torch.full((count * size,), -1.0)
        mine = whole[rank * count : (rank + 1) * count]
        mine.copy_(own_values(count))
        gather_single(whole, mine)
        assert torch.equal(whole, of_all(count))

        whole = torch.full((count * size,), -1.0)
        parts = list(whole.chunk(size))
        elsewhere = parts[(rank + 1) % size]
        elsewhere.copy_(own_values(count))
        dist.all_gather(parts, elsewhere)
        assert torch.equal(whole, of_all(count))

        whole = torch.ones(count * size)
        mine = whole[rank * count : (rank + 1) * count]
        scatter_single(mine, whole)
        assert mine.tolist() == [size] * count

        whole = torch.arange(float(size)).repeat_interleave(count) + 10 * rank
        dist.all_to_all_single(whole, whole)
        received = torch.arange(float(size)).repeat_interleave(count) * 10 + rank
        assert torch.equal(whole, received)


def scenario_outputs_that_are_dropped_at_once() -> None:
    works = []
    for _ in range(4):
        outputs = list(torch.empty(1000 * hvd.size()).chunk(hvd.size()))
        works.append(dist.all_gather(outputs, torch.ones(1000), async_op=True))
        output = torch.empty(1000)
        works.append(scatter_single(output, torch.ones(1000 * hvd.size()), async_op=True))
        del outputs, output
        gc.collect()
    for work in works:
        assert work.wait()
        assert all(bool((one == one.flatten()[0]).all()) for one in work.result())
    dist.all_gather(list(torch.empty(2 * hvd.size()).chunk(hvd.size())), torch.ones(2))


def scenario_outputs_that_are_too_small() -> None:
    size = hvd.size()
    group = ours()
    given = torch.full((size,), -1.0)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"receives {8 * size} bytes for tensor .* gave "):
            group.allgather([list(given.chunk(size))], [torch.ones(2)]).wait()
        with pytest.raises(ArgumentError, match="elements arrived"):
            group.allgather([list(given.chunk(size))], [torch.ones(0)]).wait()
        assert given.tolist() == [-1] * size
        assert works()


def scenario_outputs_of_another_dtype() -> None:
    size = hvd.size()
    group = ours()
    calls = [
        lambda: group.allgather([[torch.zeros(2) for _ in range(size)]], [torch.ones(4).half()]),
        lambda: group.alltoall([torch.zeros(1)] * size, [torch.ones(2).half()] * size),
        lambda: group.reduce_scatter_single(torch.zeros(1), torch.ones(size).double()),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"torch\.float32"):
            call()
    assert works()


test_memory = make_tests(body, {**sizes(1, 2), **on_hosts([0, 1, 0])})
