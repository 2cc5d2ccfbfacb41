"""hvdlite.numpy: the collectives of arrays and numbers, against what NumPy computes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from harness import run_world
from hvdlite.errors import ArgumentError, MismatchError
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("numpy",)

DTYPES = ["uint8", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]


def of_rank(rank: int, dtype: str = "float64", shape: tuple[int, ...] = (3, 4)) -> Any:
    """Return small whole numbers that differ between ranks and elements."""
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + rank + 1).astype(dtype)


def everyone(dtype: str = "float64", shape: tuple[int, ...] = (3, 4)) -> Any:
    return np.stack([of_rank(rank, dtype, shape) for rank in range(hvd.size())])


def mine(dtype: str = "float64", shape: tuple[int, ...] = (3, 4)) -> Any:
    return of_rank(hvd.rank(), dtype, shape)


def equal(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found == expected).all()


def scenario_sums_keep_shape_and_dtype() -> None:
    for dtype in DTYPES:
        for shape in [(3, 4), (7,), (), (0, 2)]:
            total = hvd.allreduce(mine(dtype, shape), op=hvd.Sum)
            equal(total, everyone(dtype, shape).sum(axis=0, dtype=dtype))


def scenario_whether_all_and_any() -> None:
    first = hvd.rank() == 0
    assert hvd.allreduce(first, op=hvd.Max) and hvd.allreduce(first, op=hvd.Min) == (
        hvd.size() == 1
    )
    assert hvd.allreduce(np.array([True, first]), op=hvd.Product).tolist() == [
        True,
        hvd.size() == 1,
    ]


def scenario_numbers_become_numbers() -> None:
    ranks = range(hvd.size())
    assert hvd.allreduce(float(hvd.rank())) == np.mean(ranks)
    total = hvd.allreduce(hvd.rank(), op=hvd.Sum)
    assert total == sum(ranks) and isinstance(total, np.integer)
    loss, counts = hvd.grouped_allreduce([float(hvd.rank()), [1, hvd.rank()]], op=hvd.Sum)
    assert loss == sum(ranks) and counts.tolist() == [hvd.size(), sum(ranks)]
    assert hvd.broadcast(hvd.rank(), root_rank=1) == 1


def scenario_any_layout_and_byte_order() -> None:
    expected = everyone().sum(axis=0)
    big_endian = mine().astype(">f8")
    equal(hvd.allreduce(big_endian, op=hvd.Sum), expected)
    equal(hvd.allreduce(np.asfortranarray(mine()), op=hvd.Sum), expected)
    equal(hvd.allreduce(mine()[:, ::2], op=hvd.Sum), expected[:, ::2])
    assert hvd.allreduce_(big_endian, op=hvd.Sum) is big_endian
    assert big_endian.dtype == ">f8" and (big_endian == expected).all()


def scenario_in_place() -> None:
    array = mine()
    whole = np.tile(mine(), 2)
    for given in [array, whole[:, :4]]:
        assert hvd.allreduce_(given, op=hvd.Sum) is given
        equal(given, everyone().sum(axis=0))
    equal(whole[:, 4:], mine())
    assert hvd.broadcast_(array, root_rank=0) is array
    labels = np.array([f"rank {hvd.rank()}"])
    assert hvd.broadcast_(labels, root_rank=1)[0] == "rank 1"


def scenario_rows_of_all_ranks() -> None:
    own = np.full((hvd.rank() + 1, 2), hvd.rank())
    rows = hvd.allgather(own)
    assert rows[:, 1].tolist() == [rank for rank in range(hvd.size()) for _ in range(rank + 1)]
    assert hvd.allgather(np.array([f"rank {hvd.rank()}"])).tolist() == [
        f"rank {rank}" for rank in range(hvd.size())
    ]
    day = np.array(["2026-11-23"], "datetime64[D]") + hvd.rank()
    assert hvd.allgather(day)[-1] == np.datetime64("2026-11-23") + hvd.size() - 1
    assert hvd.allgather(np.zeros((0, 3), "longdouble")).shape == (0, 3)


def scenario_rows_to_each_rank() -> None:
    size, rank = hvd.size(), hvd.rank()
    equal(hvd.alltoall(np.arange(size) * 10 + rank), rank * 10 + np.arange(size))
    splits = list(range(size))
    sent = np.repeat(np.arange(size), splits)[:, None] + 100 * rank
    rows, counts = hvd.alltoall(sent, splits)
    assert counts.tolist() == [rank] * size
    assert rows[:, 0].tolist() == [
        rank + 100 * source for source in range(size) for _ in splits[:rank]
    ]


def scenario_what_cannot_be_sent_is_named() -> None:
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall):
        with pytest.raises(ArgumentError, match="'things'.*dtype object.*allgather_object"):
            call([object()], name="things")
    with pytest.raises(ArgumentError, match="'text': tensors of dtype str32 cannot be sent"):
        hvd.allreduce("a", name="text")
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ArgumentError, match=f"{call.__name__} .* of a single number"):
            call(1.0)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for given, what in [(3.0, "float"), ([1.0], "list"), (frozen, "a read-only array")]:
        with pytest.raises(ArgumentError, match=f"writable array, not {what}"):
            hvd.allreduce_(given)
    with pytest.raises(ArgumentError, match="average, the second argument"):
        hvd.allreduce(1.0, hvd.Sum)


def scenario_differences_between_ranks_are_named() -> None:
    with pytest.raises(MismatchError, match="'shapes'"):
        hvd.allreduce(np.zeros(hvd.rank() + 1), name="shapes")
    with pytest.raises(MismatchError, match="'dtypes'"):
        hvd.allgather(np.zeros(1, ["float32", "float64"][hvd.rank() % 2]), name="dtypes")


def body() -> dict[str, str]:
    return run_all(globals())


test_numpy = make_tests(body, sizes(3))


def _without_frameworks() -> list[str]:
    import sys

    hvd.init()
    hvd.allreduce(1.0)
    return [name for name in ("torch", "tensorflow", "keras") if name in sys.modules]


def test_it_needs_no_framework() -> None:
    for result in run_world(2, _without_frameworks):
        assert result.value == []
