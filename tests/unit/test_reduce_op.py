"""Reduce operations are accepted by name or number; other values, even equal ones, are refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch.distributed

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.optimizers import check_gradient_op


def test_numbers_are_those_of_horovod() -> None:
    names = (ops.Average, ops.Sum, ops.Adasum, ops.Min, ops.Max, ops.Product)
    assert [int(op) for op in names] == list(range(6))
    assert [ops.choose_op(None, number) for number in range(6)] == list(names)
    assert pickle.loads(pickle.dumps(ops.Sum)) is ops.Sum


@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "BAND"])
def test_operations_of_torch_distributed_are_not_taken_for_others(name: str) -> None:
    op = getattr(torch.distributed.ReduceOp, name)
    with pytest.raises(ArgumentError, match="not a reduce operation of hvdlite; use one of hvd.A"):
        ops.choose_op(None, op)
    with pytest.raises(ArgumentError, match="not a reduce operation"):
        check_gradient_op(op)


@pytest.mark.parametrize("op", [True, False, 6, -1, 1.0, "sum", np.int64(1)])
def test_other_values_are_not_reduce_operations(op: Any) -> None:
    with pytest.raises(ArgumentError, match="is not a reduce operation of hvdlite"):
        ops.choose_op(None, op)


@pytest.mark.parametrize("average", [ops.Sum, ops.Average, 0, 1, np.False_, "loss", 0.5])
def test_what_slips_into_the_place_of_average_is_refused(average: Any) -> None:
    with pytest.raises(ArgumentError, match="average, the second argument, takes True, False or"):
        ops.choose_op(average, None)


def test_average_of_older_scripts() -> None:
    assert ops.choose_op(True, None) is ops.Average
    assert ops.choose_op(False, None) is ops.Sum
    assert ops.choose_op(None, None) is ops.Average
    with pytest.raises(ArgumentError, match="not both"):
        ops.choose_op(True, ops.Sum)
