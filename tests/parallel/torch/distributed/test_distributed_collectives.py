"""Every collective of torch.distributed gives with the backend hvdlite what it gives with gloo."""

from __future__ import annotations

import datetime
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import hvdlite.torch as hvd
from hvdlite.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    MismatchError,
    UnsupportedError,
)
from parallel.scenarios import make_tests, on_hosts, run_all, sizes
from parallel.torch.distributed.distributed_worlds import gloo, ours, start

PRELOAD = ("torch._dynamo",)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)
COPIED = (*FLOATS, *INTEGERS, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
SHAPES = ((7,), (), (0,), (3, 5), (64, 33))


def body() -> dict[str, str]:
    # What newer releases of torch call otherwise still has to work.
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore", FutureWarning))
    dist.destroy_process_group()
    return outcomes


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int | None = None) -> torch.Tensor:
    """Return small whole numbers, so that sums are exact in every dtype."""
    seed = hvd.rank() if seed is None else seed
    generator = torch.Generator().manual_seed(seed + 100)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def compare(call: Callable[[Any], Any]) -> None:
    """Call with both groups, and compare what comes out: tensors, or lists of them."""
    theirs, mine = call(gloo()), call(ours())
    theirs, mine = (one if isinstance(one, list) else [one] for one in (theirs, mine))
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        assert same(a, b), (a, b)


def compare_async(call: Callable[..., Any], tensors: Callable[[], list[torch.Tensor]]) -> None:
    """Compare an operation that is waited for by `wait`, by its future, and at once."""

    def run(group: Any, how: str) -> list[torch.Tensor]:
        made = tensors()
        work = call(*made, group=group, async_op=how != "at once")
        if how == "wait":
            assert work.wait()
        elif how == "future":
            (work if group is gloo() else work.get_future()).wait()
        return made

    for how in ("at once", "wait", "future") if tensors()[0].dtype == torch.float32 else ("wait",):
        compare(lambda group, how=how: run(group, how))


def scenario_all_reduce() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for shape in SHAPES:
            for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
                compare_async(
                    lambda tensor, op=op, **options: dist.all_reduce(tensor, op, **options),
                    lambda shape=shape, dtype=dtype: [values(shape, dtype)],
                )


def all_gather(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(shape, dtype=dtype) for _ in range(hvd.size())]
    dist.all_gather(outputs, values(shape, dtype), group=group)
    return outputs


def all_gather_into_tensor(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    output = torch.zeros(hvd.size() * shape[0], *shape[1:], dtype=dtype)
    dist.all_gather_into_tensor(output, values(shape, dtype), group=group)
    return output


def reduce_scatter(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    output = torch.zeros(shape, dtype=dtype)
    parts = [values(shape, dtype) + r for r in range(hvd.size())]
    dist.reduce_scatter(output, parts, group=group)
    return output


def reduce_scatter_tensor(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    output = torch.zeros(shape, dtype=dtype)
    whole = values((hvd.size() * shape[0], *shape[1:]), dtype)
    dist.reduce_scatter_tensor(output, whole, ReduceOp.MAX, group=group)
    return output


def gather(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    root = hvd.size() - 1
    outputs = [torch.zeros(shape, dtype=dtype) for _ in range(hvd.size())]
    dist.gather(values(shape, dtype), outputs if hvd.rank() == root else None, root, group=group)
    return outputs


def scatter(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    root, output = hvd.size() - 1, torch.zeros(shape, dtype=dtype)
    parts = [values(shape, dtype, r) for r in range(hvd.size())]
    dist.scatter(output, parts if hvd.rank() == root else None, root, group=group)
    return output


def all_to_all_single(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    rows = [(hvd.rank() + r) % 3 for r in range(hvd.size())]  # sent and received alike
    output = torch.zeros(sum(rows), *shape, dtype=dtype)
    dist.all_to_all_single(output, values((sum(rows), *shape), dtype), rows, rows, group=group)
    return output


EXACT = (torch.float32, torch.float64, torch.int64)
# Each with what gloo takes of dtypes and shapes.
CALLS: dict[Callable[..., Any], tuple[Sequence[torch.dtype], Sequence[tuple[int, ...]]]] = {
    all_gather: ((*FLOATS, *INTEGERS), SHAPES),
    all_gather_into_tensor: ((*FLOATS, *INTEGERS), ((4,), (3, 5), (0,))),
    reduce_scatter: (EXACT, SHAPES),
    reduce_scatter_tensor: (EXACT, ((4,), (3, 5), (0,))),
    gather: ((*FLOATS, *INTEGERS), ((4,), (2, 3), ())),
    scatter: ((*FLOATS, *INTEGERS), ((4,), (2, 3), ())),
    all_to_all_single: (EXACT, ((), (3,))),
}


def scenario_every_collective_gives_what_gloo_gives() -> None:
    for call, (dtypes, shapes) in CALLS.items():
        for dtype, shape in itertools.product(dtypes, shapes):
            compare(functools.partial(call, shape=shape, dtype=dtype))


def scenario_broadcast() -> None:
    for dtype, shape, root in itertools.product(COPIED, SHAPES, {0, hvd.size() - 1}):
        tensor = values(shape, dtype)
        dist.broadcast(tensor, root)
        assert same(tensor, values(shape, dtype, root)), (dtype, shape, root)


def scenario_all_reduce_of_bools_and_complex_numbers() -> None:
    rank, size = hvd.rank(), hvd.size()
    for op, expected in (
        *((op, [False, True, True]) for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR)),
        *((op, [False, False, True]) for op in (ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND)),
    ):
        flags = torch.tensor([False, rank == 0, True])
        dist.all_reduce(flags, op)
        assert flags.tolist() == (expected if size > 1 else [False, True, True]), op
    numbers = torch.tensor([[1 + 2j, rank * 1j]])
    dist.all_reduce(numbers)
    assert numbers.tolist() == [[size * (1 + 2j), sum(range(size)) * 1j]]
    dist.all_reduce(numbers, ReduceOp.AVG)
    assert numbers.tolist() == [[size * (1 + 2j), sum(range(size)) * 1j]]


def scenario_all_reduce_multiplies_first_or_averages() -> None:
    tensor = torch.full((3,), hvd.rank() + 1.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert tensor.tolist() == [sum(range(1, hvd.size() + 1)) / 2] * 3
    mean = torch.full((3,), hvd.rank() + 1.0)
    dist.all_reduce(mean, ReduceOp.AVG)
    assert mean.tolist() == [(hvd.size() + 1) / 2] * 3


def scenario_coalescing_together() -> None:
    size = hvd.size()
    reduced = [torch.ones(4), torch.ones(2, 3)]
    with dist._coalescing_manager(ours()):
        for tensor in reduced:
            dist.all_reduce(tensor)
    assert all(torch.equal(one, torch.full_like(one, size)) for one in reduced)
    gathered = [torch.empty(2 * size), torch.empty(size, 3)]
    with dist._coalescing_manager(ours()):
        dist.all_gather_into_tensor(gathered[0], torch.ones(2))
        dist.all_gather_into_tensor(gathered[1], torch.ones(1, 3))
    assert all(bool((one == 1).all()) for one in gathered)
    scattered = [torch.empty(2), torch.empty(1, 3)]
    with dist._coalescing_manager(ours()):
        dist.reduce_scatter_tensor(scattered[0], torch.ones(2 * size))
        dist.reduce_scatter_tensor(scattered[1], torch.ones(size, 3))
    assert all(torch.equal(one, torch.full_like(one, size)) for one in scattered)


def scenario_reduce() -> None:
    for root in (0, hvd.size() - 1):
        for shape in SHAPES:
            tensor = values(shape, torch.float32)
            expected = tensor.clone()
            dist.all_reduce(expected, group=gloo())
            before = tensor.clone()
            dist.reduce(tensor, root)
            assert torch.equal(tensor, expected if hvd.rank() == root else before)


def scenario_all_gather_of_any_dtype_and_size() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in COPIED:
        outputs = [torch.zeros(r + 1, 2).to(dtype) for r in range(size)]
        dist.all_gather(outputs, values((rank + 1, 2), dtype))
        for r, output in enumerate(outputs):
            assert same(output, values((r + 1, 2), dtype, r)), dtype


def scenario_reduce_scatter_of_different_sizes() -> None:
    size, rank = hvd.size(), hvd.rank()
    parts = [torch.full((r + 1,), float(rank)) for r in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, parts)
    assert output.tolist() == [sum(range(size))] * (rank + 1)


def scenario_all_to_all() -> None:
    size, rank = hvd.size(), hvd.rank()
    inputs = [torch.full((r + 1, 2), 10 * rank + r) for r in range(size)]
    outputs = [torch.zeros(rank + 1, 2, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(outputs, inputs)
    for r, output in enumerate(outputs):
        assert torch.equal(output, torch.full((rank + 1, 2), 10 * r + rank))


def scenario_wrong_splits_are_told() -> None:
    size = hvd.size()
    with pytest.raises((ArgumentError, ValueError, RuntimeError)):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
    with pytest.raises((ArgumentError, ValueError, RuntimeError)):
        dist.all_gather([torch.zeros(2)] * (size + 1), torch.zeros(2))


def scenario_not_contiguous() -> None:
    size = hvd.size()
    for op in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, size - 1)):
        tensor, plain = torch.zeros(4, 6).t(), values((6, 4), torch.float32)
        tensor.copy_(plain)
        op(tensor)
        op(plain)
        assert torch.equal(tensor, plain)
    output = torch.zeros(3, 2 * size).t()
    dist.all_gather_into_tensor(output, values((3, 2), torch.float32).t())
    expected = torch.cat([values((3, 2), torch.float32, r).t() for r in range(size)])
    assert torch.equal(output, expected)


def scenario_negated_views() -> None:
    tensor = torch.tensor([1 + 2j]).conj().imag
    assert tensor.is_neg()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [-2.0 * hvd.size()]


def scenario_parameters_are_data() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    before = parameter._version
    (parameter * 2).sum().backward()
    dist.broadcast(parameter, 0)
    dist.all_reduce(parameter.grad)
    assert parameter.grad.tolist() == [2.0 * hvd.size()] * 3
    assert parameter._version == before


def scenario_send_and_receive() -> None:
    size, rank = hvd.size(), hvd.rank()
    if size == 1:
        return
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for dtype in COPIED:
        for shape in ((4,), (2, 3), (0,), ()):
            received = torch.zeros(shape).to(dtype)
            works = [dist.isend(values(shape, dtype), following), dist.irecv(received, preceding)]
            for work in works:
                work.wait()
            assert same(received, values(shape, dtype, preceding)), dtype


def scenario_tags_and_order() -> None:
    if hvd.rank() == 0 and hvd.size() > 1:
        for number in range(20):
            dist.send(torch.tensor(float(number)), 1, tag=number % 2)
    elif hvd.rank() == 1:
        got: list[list[float]] = [[], []]
        received = [torch.tensor(-1.0) for _ in range(20)]
        works = [dist.irecv(one, 0, tag=i % 2) for i, one in enumerate(received)]
        for i, work in enumerate(works):
            assert work.wait()
            got[i % 2].append(float(received[i]))
        assert got == [list(range(0, 20, 2)), list(range(1, 20, 2))]


def scenario_batches_of_sends() -> None:
    size, rank = hvd.size(), hvd.rank()
    others = [r for r in range(size) if r != rank]
    received = [torch.zeros(3) for _ in others]
    sends = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), r) for r in others]
    receives = [dist.P2POp(dist.irecv, one, r) for one, r in zip(received, others, strict=True)]
    if others:
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
    assert [one.tolist() for one in received] == [[float(r)] * 3 for r in others]


def scenario_sizes_that_differ_are_told() -> None:
    group = dist.new_group(sorted({0, hvd.size() - 1}))
    if hvd.size() > 1 and hvd.rank() in (0, hvd.size() - 1):
        last = hvd.rank() != 0
        work = (
            dist.irecv(torch.zeros(4), 0, group=group)
            if last
            else dist.isend(torch.zeros(3), hvd.size() - 1, group=group)
        )
        with pytest.raises(MismatchError):
            work.wait()
    with pytest.raises(UnsupportedError, match="src="):
        dist.recv(torch.zeros(2))


def scenario_barriers() -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    # Before torch 2.14 dist.monitored_barrier asks for gloo by name.
    group, last, own = ours(), hvd.size() - 1, hvd.rank()
    group.monitored_barrier()
    if last == 0:
        return
    if own == last:
        hvd.barrier()
    text = f"{last} failed to pass" if own in (0, last) else "monitoredBarrier"
    seconds = datetime.timedelta(seconds=120 if own == last else 0.05)
    with pytest.raises(CollectiveTimeoutError, match=text):
        group.monitored_barrier(seconds, wait_all_ranks=True)
    if own != last:
        hvd.barrier()


def scenario_another_order_of_different_shapes() -> None:
    tensors = [torch.full((count,), float(hvd.rank())) for count in (3, 5, 7)]
    order = tensors if hvd.rank() % 2 else tensors[::-1]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in order]:
        work.wait()
    for tensor in tensors:
        assert tensor.tolist() == [sum(range(hvd.size()))] * len(tensor)


def scenario_refused_tensors() -> None:
    refused: list[tuple[torch.Tensor, Any, str]] = [
        (torch.empty(2, device="meta"), ReduceOp.SUM, "cuda:nccl,cpu:hvdlite"),
        (torch.ones(2, dtype=torch.float32), ReduceOp.BAND, "gloo"),
    ]
    for tensor, op, text in refused:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with pytest.raises(UnsupportedError, match=text):
            ours().allreduce([tensor], options)
        assert issubclass(UnsupportedError, NotImplementedError)


def scenario_other_devices_have_their_own_backend() -> None:
    group = dist.new_group(backend="meta:gloo,cpu:hvdlite")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [hvd.size()] * 2
    assert [device.type for device in group._device_types] == ["meta", "cpu"]
    dist.all_reduce(torch.empty(2, device="meta"), group=group)  # gloo computes nothing of it
    assert list(group._groups_of_torch) == ["meta"]
    dist.all_reduce(tensor, group=group)  # Now all ranks have connected gloo's group.
    dist.destroy_process_group(group)


def scenario_bits_of_whole_numbers() -> None:
    size, rank = hvd.size(), hvd.rank()
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        for dtype in INTEGERS:
            theirs, mine = values((15,), dtype), values((15,), dtype)
            dist.all_reduce(theirs, op, group=gloo())
            dist.all_reduce(mine, op, async_op=True).wait()
            assert torch.equal(mine, theirs)
            tensor, expected = values((5,), dtype), values((5,), dtype)
            dist.all_reduce(expected, op)
            dist.reduce(tensor, size - 1, op)
            assert torch.equal(tensor, expected if rank == size - 1 else values((5,), dtype))
            whole = values((2 * size,), dtype)
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


def scenario_some_ranks() -> None:
    group = dist.new_group([hvd.size() - 1])
    half = dist.new_group(list(range(max(1, hvd.size() // 2))))
    if hvd.rank() == hvd.size() - 1:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1, 1]
    if hvd.rank() < max(1, hvd.size() // 2):
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=half)
        assert tensor.tolist() == [max(1, hvd.size() // 2)] * 2
        dist.destroy_process_group(half)


test_collectives = make_tests(body, {**sizes(1, 4), **on_hosts([0, 1, 0])})
