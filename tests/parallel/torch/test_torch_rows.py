"""The collectives that work on rows, on torch tensors: values, forms, gradients, and misuse.

Each rank computes the expected results with `make`, which makes the tensors of any rank.
"""

from __future__ import annotations

import itertools

import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, raises, run_all

PRELOAD = ("torch._dynamo",)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# The dimensions after the first.
TAILS: list[tuple[int, ...]] = [(), (3,), (2, 0), (2, 5)]
OPS = ["Average", "Sum", "Min", "Max", "Product"]


def make(rank: int, rows: int, tail: tuple[int, ...] = (), dtype: torch.dtype = torch.float32,
         seed: int = 0) -> torch.Tensor:  # fmt: skip
    """Make a rank's tensor; small whole numbers for integers, anything for floats."""
    generator, shape = torch.Generator().manual_seed(1000 * seed + rank), (rows, *tail)
    with torch.device("cpu"):
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            values = torch.randint(0, 5, shape, generator=generator)
    return values.to(torch.get_default_device(), dtype)


def everybody() -> range:
    return range(hvd.size())


def share_of(rank: int, rows: int) -> slice:
    """Return the rows of a reducescatter that a rank gets."""
    each, more = divmod(rows, hvd.size())
    begin = each * rank + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def splits_of(rank: int, seed: int) -> list[int]:
    return [(3 * rank + 2 * peer + seed) % 4 for peer in everybody()]


def exchanged(tail: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Compute what this rank receives when rank r sends splits_of(r, seed) of its rows."""
    parts = []
    for rank in everybody():
        splits = splits_of(rank, seed)
        parts.append(make(rank, sum(splits), tail, dtype).split(splits)[hvd.rank()])
    return torch.cat(parts)


def scenario_alltoall_by_splits() -> None:
    for seed, (dtype, tail) in enumerate(
        itertools.product([*INTEGERS, *FLOATS, torch.bool], TAILS)
    ):
        splits = splits_of(hvd.rank(), seed)
        tensor = make(hvd.rank(), sum(splits), tail, dtype)
        before = tensor.clone()
        output, received = hvd.alltoall(tensor, splits)
        assert torch.equal(output, exchanged(tail, dtype, seed)) and output.dtype == dtype
        assert received.tolist() == [splits_of(r, seed)[hvd.rank()] for r in everybody()]
        assert torch.equal(tensor, before)
        handle = hvd.alltoall_async(tensor, torch.tensor(splits, dtype=torch.int32), name="named")
        again, numbers = hvd.synchronize(handle)
        assert torch.equal(again, output) and numbers.dtype == torch.int32
        again += again  # The tensor owns its memory.


def scenario_alltoall_without_splits() -> None:
    for dtype, tail, rows in itertools.product([torch.int64, torch.float32], TAILS, [0, 1, 3]):
        output = hvd.alltoall(make(hvd.rank(), rows * hvd.size(), tail, dtype))
        parts = [make(r, rows * hvd.size(), tail, dtype) for r in everybody()]
        own = slice(rows * hvd.rank(), rows * (hvd.rank() + 1))
        assert torch.equal(output, torch.cat([part[own] for part in parts]))
    output = hvd.synchronize(hvd.alltoall_async(torch.arange(hvd.size())))
    assert output.tolist() == [hvd.rank()] * hvd.size()


def scenario_alltoall_of_what_is_not_contiguous() -> None:
    tensor = torch.arange(2.0 * hvd.size()).reshape(2, -1).t()
    expected = torch.tensor([[hvd.rank(), hvd.size() + hvd.rank()]] * hvd.size())
    assert torch.equal(hvd.alltoall(tensor), expected.float())


def scenario_alltoall_of_much() -> None:
    rows = 300_001 * (hvd.rank() + 1)
    splits = [rows if peer == hvd.size() - 1 else 0 for peer in everybody()]
    output, received = hvd.alltoall(torch.full((rows,), hvd.rank()), splits)
    if hvd.rank() < hvd.size() - 1:
        assert output.numel() == 0 and received.sum() == 0
    else:
        assert received.tolist() == [300_001 * (r + 1) for r in everybody()]
        for rank, part in zip(everybody(), output.split(received.tolist()), strict=True):
            assert (part == rank).all()


def scenario_reducescatter_is_a_share_of_an_allreduce() -> None:
    rows = [0, 1, hvd.size() - 1, hvd.size(), 2 * hvd.size() + 1]
    for dtype, tail, op in itertools.product([*INTEGERS, *FLOATS], TAILS, OPS):
        number = getattr(hvd, op)
        tensors = [make(hvd.rank(), count, tail, dtype) for count in rows]
        scattered = hvd.grouped_reducescatter(tensors, op=number)
        reduced = hvd.grouped_allreduce(tensors, op=number)
        for part, whole, count in zip(scattered, reduced, rows, strict=True):
            # Not equal(): a NaN from an overflow would differ from itself.
            expected = whole[share_of(hvd.rank(), count)]
            torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


def scenario_reducescatter_of_integers_is_exact() -> None:
    for dtype, rows in itertools.product(INTEGERS, [1, 7]):
        tensors = [make(r, rows, (2,), dtype) for r in everybody()]
        expected = torch.stack(tensors).sum(0).to(dtype)[share_of(hvd.rank(), rows)]
        assert torch.equal(hvd.reducescatter(tensors[hvd.rank()], op=hvd.Sum), expected)


def alike(result: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6) -> bool:
    """Compare what two operations have scaled: on GPUs they round at different places."""
    if wanted.is_cuda:
        return torch.allclose(result, wanted, rtol=tolerance)
    return torch.equal(result, wanted)


def scenario_reducescatter_in_every_form() -> None:
    rows = 2 * hvd.size() + 1
    tensor, other = make(hvd.rank(), rows, (3,)), make(hvd.rank(), 4, (), torch.float64)
    arguments = {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7}
    own = share_of(hvd.rank(), rows)
    wanted = hvd.allreduce(tensor, **arguments)[own]
    assert alike(hvd.reducescatter(tensor, "named", **arguments), wanted)
    handle = hvd.reducescatter_async(tensor, **arguments)
    assert alike(hvd.synchronize(handle), wanted) and hvd.poll(handle)
    other_wanted = hvd.allreduce(other, **arguments)[share_of(hvd.rank(), 4)]
    for results in (
        hvd.grouped_reducescatter([tensor, other], **arguments),
        hvd.synchronize(hvd.grouped_reducescatter_async([tensor, other], **arguments)),
    ):
        assert alike(results[0], wanted) and alike(results[1], other_wanted)
    mean = hvd.reducescatter(tensor, compression=hvd.Compression.fp16)
    assert mean.dtype == torch.float32
    assert alike(mean, hvd.allreduce(tensor, compression=hvd.Compression.fp16)[own], 1e-3)
    assert hvd.grouped_reducescatter([]) == []


def given(splits: list[int]) -> slice:
    begin = sum(splits[: hvd.rank()])
    return slice(begin, begin + splits[hvd.rank()])


def scenario_reducescatter_by_splits_is_a_part_of_an_allreduce() -> None:
    size = hvd.size()
    tables = [
        [7] + [0] * (size - 1),
        [3 * r % 4 for r in everybody()],
        [40_000 - r for r in everybody()],
    ]
    for dtype, op, splits in itertools.product([*INTEGERS, *FLOATS], OPS, tables):
        number, tail = getattr(hvd, op), (3,) if sum(splits) < 100 else ()
        tensor = make(hvd.rank(), sum(splits), tail, dtype)
        part = hvd.reducescatter(tensor, op=number, splits=splits)
        expected = hvd.allreduce(tensor, op=number)[given(splits)]
        torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


def scenario_reducescatter_by_splits_in_every_form() -> None:
    splits = [2 * r for r in everybody()]
    tensor = make(hvd.rank(), sum(splits), (2,))
    arguments = {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7}
    wanted = hvd.allreduce(tensor, **arguments)[given(splits)]
    for each in (splits, torch.tensor(splits), tuple(splits), (one for one in splits)):
        assert alike(hvd.reducescatter(tensor, splits=each, **arguments), wanted)
    handle = hvd.reducescatter_async(tensor, splits=splits, **arguments)
    assert alike(hvd.synchronize(handle), wanted)
    fp16 = hvd.Compression.fp16
    mean = hvd.reducescatter(tensor, compression=fp16, splits=splits)
    assert torch.equal(mean, hvd.allreduce(tensor, compression=fp16)[given(splits)])
    tensor.requires_grad_()
    part = hvd.reducescatter(tensor, op=hvd.Average, splits=splits)
    (part * (hvd.rank() + 1)).sum().backward()
    factors = torch.repeat_interleave(torch.arange(1.0, hvd.size() + 1), torch.tensor(splits))
    assert torch.equal(tensor.grad, factors.unsqueeze(1).expand_as(tensor))


def scenario_wrong_splits_of_a_reducescatter() -> None:
    size = hvd.size()
    if size == 1:
        return
    tensor = torch.ones(2 * size)
    ones = [1] * size
    cases = [
        (ones, f"which add up to {size}, but {2 * size} rows"),
        ([2] * (size + 1), f"has {size + 1} splits in a process set of {size}; give one for each"),
        ([-1, 2 * size + 1] + [0] * (size - 2), "has a negative split"),
    ]
    for splits, text in cases:
        with raises(hvd.ArgumentError, f"reducescatter 'x': rank .*{text}"):
            hvd.reducescatter(tensor, name="x", splits=splits)
    other = [2] * size
    other[0], other[1] = other[1] + hvd.rank() // (size - 1), other[0] - hvd.rank() // (size - 1)
    text = rf"'x': ranks disagree about the splits: .*rank {size - 1} has \[3, 1"
    with raises(hvd.MismatchError, text):
        hvd.reducescatter(tensor, name="x", splits=other)
    for splits in ([], [1.5] * size):
        with raises(hvd.ArgumentError, "give one whole number of rows for each rank"):
            hvd.reducescatter(tensor, name="x", splits=splits)
    assert len(hvd.reducescatter(tensor, name="x", splits=[2] * size)) == 2


def scenario_reducescatter_of_much() -> None:
    rows = 700_001
    part = hvd.reducescatter(torch.arange(rows) + hvd.rank(), op=hvd.Sum)
    own = share_of(hvd.rank(), rows)
    expected = torch.arange(rows)[own] * hvd.size() + sum(everybody())
    assert torch.equal(part, expected)


def scenario_grouped_allgather() -> None:
    dtypes = [*INTEGERS, *FLOATS, torch.bool]
    shapes = [((hvd.rank() + i) % 3, *TAILS[i % 4]) for i in range(len(dtypes))]
    tensors = [
        make(hvd.rank(), shape[0], shape[1:], dtype)
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]
    for results in (
        hvd.grouped_allgather(tensors),
        hvd.synchronize(hvd.grouped_allgather_async(tensors, name="named")),
    ):
        for i, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
            parts = [make(r, (r + i) % 3, TAILS[i % 4], dtype) for r in everybody()]
            assert result.dtype == dtype and torch.equal(result, torch.cat(parts))
    assert hvd.grouped_allgather([]) == []


def scenario_many_in_flight() -> None:
    order = [(i + 7 * hvd.rank()) % 30 for i in range(30)]
    handles = {}
    for i in order:
        tensor = torch.full((hvd.size(), i), hvd.rank() + i)
        start = [hvd.alltoall_async, hvd.reducescatter_async, hvd.allgather_async][i % 3]
        handles[i] = start(tensor, name=f"many.{i}")
    for i in reversed(order):
        rows = hvd.size() ** 2 if i % 3 == 2 else 1 if i % 3 == 1 else hvd.size()
        assert hvd.synchronize(handles[i]).shape == (rows, i)


def scenario_gradient_of_alltoall() -> None:
    splits = splits_of(hvd.rank(), 1)
    for arguments in ({"splits": splits}, {}):
        rows = sum(splits) if arguments else 2 * hvd.size()
        x = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
        result = hvd.alltoall(x**2, **arguments)
        output = result[0] if arguments else result
        (output * (hvd.rank() + 1)).sum().backward()
        receivers = torch.tensor([r + 1.0 for r in everybody()], dtype=torch.float64)
        sent = torch.tensor(splits if arguments else [2] * hvd.size())
        expected = 2 * torch.repeat_interleave(receivers, sent)[:, None].expand(-1, 2)
        assert x.grad is not None and torch.equal(x.grad, expected)


def scenario_gradient_of_reducescatter() -> None:
    rows = 2 * hvd.size() + 1
    weights = torch.arange(1.0, rows + 1)
    for op, factor in [(hvd.Sum, float(hvd.size())), (hvd.Average, 1.0)]:
        x = torch.ones(rows, requires_grad=True)
        arguments = {"op": op, "prescale_factor": 0.5, "postscale_factor": 3.0}
        part = hvd.reducescatter(x, **arguments)
        (part * weights[share_of(hvd.rank(), rows)]).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, weights * 1.5 * factor)
        x = torch.ones(rows, requires_grad=True)
        first, second = hvd.grouped_reducescatter([x, 2 * x], op=op)
        (first.sum() + second.sum()).backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.full((rows,), 3 * factor))


def scenario_gradient_of_grouped_allgather() -> None:
    x = torch.ones(hvd.rank() + 1, requires_grad=True)
    first, second = hvd.grouped_allgather([x, x * x])
    (first.sum() + second.sum()).backward()
    assert x.grad is not None and (x.grad == 3).all()


def scenario_gradient_of_a_gradient() -> None:
    x = torch.full((hvd.size(),), 2.0, requires_grad=True)
    for verb in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
        x.grad = None
        arguments = {"op": hvd.Sum} if verb is hvd.reducescatter else {}
        output = verb(x**3, **arguments)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        slope.sum().backward()
        factor = hvd.size() if verb is hvd.reducescatter else 1
        assert x.grad is not None and (x.grad == 12 * factor).all(), verb


def scenario_no_gradient_of_max() -> None:
    x = torch.ones(hvd.size(), requires_grad=True)
    with raises(hvd.ArgumentError, "reducescatter 'top' with op=hvd.Max has no gradient; use"):
        hvd.reducescatter(x, name="top", op=hvd.Max).sum().backward()


def scenario_bad_splits_are_an_error_everywhere() -> None:
    guilty = hvd.size() - 1
    n = hvd.size()
    cases = [
        ([1] * n, rf"rank {guilty} has splits \[1.*\], which add up to {n}, but {n + 1} rows"),
        ([1] * (n + 1), f"rank {guilty} has {n + 1} splits in a process set of {n}"),
        ([n + 2, -1, *[0] * (n - 2)] if n > 1 else [-1], f"rank {guilty} has a negative split"),
    ]
    for splits, text in cases:
        fine = [n + 1, *[0] * (n - 1)]
        with raises(hvd.ArgumentError, f"alltoall 'bad': {text}"):
            hvd.alltoall(torch.ones(n + 1), splits if hvd.rank() == guilty else fine, name="bad")
    if n > 1:
        with raises(hvd.ArgumentError, rf"rank \d has {n + 1} rows, which cannot be split evenly"):
            hvd.alltoall(torch.ones(n + 1), name="bad")
    assert hvd.alltoall(torch.ones(n), name="bad").sum() == n


def scenario_misuse_says_what_to_do() -> None:
    for verb in (hvd.alltoall, hvd.reducescatter):
        with raises(hvd.ArgumentError, r"without dimensions has no rows; reshape it to \[1\]"):
            verb(torch.tensor(1.0))
        with raises(hvd.ArgumentError, "is a float, not a tensor"):
            verb(3.0)
    with raises(hvd.ArgumentError, r"splits=\[0.5\]; give one whole number of rows for each rank"):
        hvd.alltoall(torch.ones(2), [0.5])
    with raises(hvd.ArgumentError, "give one whole number"):
        hvd.alltoall(torch.ones(2), torch.ones(1, 1, dtype=torch.int64))
    with raises(hvd.ArgumentError, "bool cannot be reduced"):
        hvd.reducescatter(torch.ones(2, dtype=torch.bool))
    with raises(hvd.ArgumentError, "op=9 is not a reduce operation"):
        hvd.reducescatter(torch.ones(2), op=9)


def scenario_mismatch_is_an_error_and_the_world_goes_on() -> None:
    if hvd.size() == 1:
        return
    odd = hvd.rank() == hvd.size() - 1
    n = hvd.size()
    kinds = {
        "dtype": torch.ones(n, 2, dtype=torch.float64 if odd else torch.float32),
        "shape": torch.ones(n, 3 if odd else 2),
    }
    for field, tensor in kinds.items():
        for verb in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
            text = f"{verb.__name__} 'broken': ranks disagree about the {field}: rank "
            with raises(hvd.MismatchError, text):
                verb(tensor, name="broken")
    with raises(hvd.MismatchError, "about the shape"):
        hvd.reducescatter(torch.ones(n + odd), name="broken")
    with raises(hvd.MismatchError, "about the reduce op"):
        hvd.reducescatter(torch.ones(n), name="broken", op=hvd.Max if odd else hvd.Sum)
    with raises(hvd.MismatchError, "about the operation"):
        (hvd.alltoall if odd else hvd.allgather)(torch.ones(n), name="broken")
    with raises(hvd.MismatchError, "about the number of tensors"):
        hvd.grouped_allgather([torch.ones(n)] * (1 + odd), name="broken")
    with raises(hvd.MismatchError, r"'broken\.1': .* about the dtype"):
        hvd.grouped_reducescatter([torch.ones(n), kinds["dtype"]], name="broken")
    assert hvd.reducescatter(torch.ones(n), op=hvd.Sum).tolist() == [n]


def body() -> dict[str, str]:
    return run_all(globals())


WORLDS = [[0], [0, 0], [0, 0, 1], [0, 1, 1, 0]]


test_rows = make_tests(body, on_hosts(*WORLDS))
