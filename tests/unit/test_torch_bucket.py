"""Buckets, automatic names and argument checks of the PyTorch adapter, without other ranks."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.torch.bucket_memory import (
    FIRST_BUCKET_BYTES,
    bytes_of_cap,
    follow_groups,
    plan_buckets,
    split_evenly,
)
from hvdlite.torch.collectives.tensors import NUMBER_OF
from hvdlite.torch.compression import Compression

MIB = 1 << 20


def tensors(*sizes: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Make tensors of these sizes in MiB."""
    return [torch.empty(int(size * MIB) // dtype.itemsize, dtype=dtype) for size in sizes]


def positions(params: list[torch.Tensor], buckets: list[list[torch.Tensor]]) -> list[list[int]]:
    index = {id(param): i for i, param in enumerate(params)}
    return [[index[id(param)] for param in bucket] for bucket in buckets]


def test_buckets_follow_backward_and_the_first_is_small() -> None:
    assert FIRST_BUCKET_BYTES == MIB
    params = tensors(10, 10, 10, 10, 0.5, 0.25, 0.25)
    assert positions(params, plan_buckets(params, 25 * MIB)) == [[6, 5, 4], [3, 2, 1], [0]]


def test_the_device_decides_unless_a_size_is_given() -> None:
    params = tensors(*[1] * 12)
    assert [len(one) for one in plan_buckets(params, None)] == [1, 4, 4, 3]
    assert bytes_of_cap(None) is None and bytes_of_cap(2) == 2 * MIB
    with pytest.raises(ArgumentError, match="positive number of MiB"):
        bytes_of_cap(0)


def test_large_tensors_have_their_own_bucket() -> None:
    params = tensors(30, 30, 2)
    assert positions(params, plan_buckets(params, 25 * MIB)) == [[2], [1], [0]]


def test_a_bucket_has_one_dtype() -> None:
    floats, halves = tensors(0.25, 0.25), tensors(0.25, 0.25, dtype=torch.float16)
    params = [floats[0], halves[0], floats[1], halves[1]]
    assert positions(params, plan_buckets(params, MIB)) == [[3, 1], [2, 0]]


def test_every_parameter_is_in_one_bucket() -> None:
    params = tensors(*([0.01] * 50))
    for cap in (1, MIB // 4, 100 * MIB):
        buckets = plan_buckets(params, cap)
        assert sorted(chain(*positions(params, buckets))) == list(range(50))
    assert plan_buckets([], MIB) == []


@pytest.mark.parametrize(("count", "lengths"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
def test_split_evenly(count: int, lengths: list[int]) -> None:
    params = tensors(*([0.01] * 5))
    buckets = split_evenly(params, count)
    assert [len(bucket) for bucket in buckets] == lengths
    assert list(chain(*positions(params, buckets))) == [4, 3, 2, 1, 0]


def test_groups_and_those_in_none() -> None:
    params = tensors(*([0.01] * 5))
    buckets = follow_groups(params, [[params[0], params[4]], [params[2]]])
    assert positions(params, buckets) == [[4, 0], [3], [2], [1]]


def test_names_are_numbered_per_kind_and_restart() -> None:
    ops.return_to_names({})
    assert [ops.next_name("allreduce") for _ in range(2)] == [
        "#allreduce.0",
        "#allreduce.1",
    ]
    assert ops.next_name("broadcast") == "#broadcast.0"
    ops.return_to_names({})
    assert ops.next_name("allreduce") == "#allreduce.0"


def test_every_dtype_of_the_core_is_torchs() -> None:
    from hvdlite._core import DTYPES

    only_tensorflow = {"float8_e4m3b11fnuz"}
    assert sorted(NUMBER_OF.values()) == sorted(
        number for name, number in DTYPES.items() if name not in only_tensorflow
    )
    with pytest.raises(
        ArgumentError, match="'x': tensors of dtype int4.*convert it to one of uint8"
    ):
        ops.dtype_number("int4", "x")


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression_keeps_narrow_and_integer_types(name: str) -> None:
    compression = getattr(Compression, name)
    for dtype in (torch.float32, torch.float64):
        wire, context = compression.compress(torch.ones(2, dtype=dtype))
        assert wire.dtype.itemsize == 2
        assert compression.decompress(wire, context).dtype == dtype
    for dtype in (torch.int64, torch.float16, torch.bfloat16):
        tensor = torch.ones(2, dtype=dtype)
        wire, context = compression.compress(tensor)
        assert wire is tensor and compression.decompress(wire, context) is tensor
