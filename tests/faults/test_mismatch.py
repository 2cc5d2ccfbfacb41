"""If ranks submit different things under one name, all get an error, and the world goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from faults.arrays import describe, ones, reduce_array, seconds_between, submit, works
from harness import run_world
from hvdlite import basics
from hvdlite.errors import DuplicateNameError, MismatchError
from patience import Stopwatch

PRELOAD = ("numpy",)

BOUND = 1.0
TENSOR = "layer.bias"


def submit_a_mismatch(shapes: list[int], dtypes: list[str], ops: list[str]) -> dict[str, Any]:
    """Submit a tensor with this rank's entries of the lists; then use the world once more."""
    basics.init()
    assert works("before")
    rank = basics.rank()
    begun = Stopwatch()
    try:
        reduce_array(np.ones(shapes[rank], dtype=dtypes[rank]), TENSOR, ops[rank])
    except MismatchError as error:
        return {**describe(error), "begun": begun, "works": works("after")}
    raise AssertionError("the mismatch was not noticed")


@pytest.mark.parametrize(
    ("shapes", "dtypes", "ops", "values"),
    [
        pytest.param([8, 8, 9], ["float32"] * 3, ["sum"] * 3, ["8", "9"], id="shape"),
        pytest.param(
            [8] * 3,
            ["float32", "float32", "int32"],
            ["sum"] * 3,
            ["float32", "int32"],
            id="dtype-of-the-same-size",
        ),
        pytest.param([8] * 3, ["float32"] * 3, ["sum", "sum", "max"], ["sum", "max"], id="op"),
    ],
)
def test_mismatch_is_an_error_on_every_rank_and_the_world_goes_on(
    shapes: list[int], dtypes: list[str], ops: list[str], values: list[str]
) -> None:
    results = run_world(3, submit_a_mismatch, args=(shapes, dtypes, ops))
    for result in results:
        message = result.value["message"]
        assert TENSOR in message
        assert "rank 2" in message
        assert "rank 0" in message or "rank 1" in message
        for value in values:
            assert value in message.lower()
        seen = result.value["seen"]
        assert min(seconds_between(one.value["begun"], seen) for one in results) <= BOUND
        assert result.value["works"]


def submit_twice() -> dict[str, Any]:
    basics.init()
    if basics.rank() == 1:
        assert works("later")
        reduce_array(ones(), TENSOR)
        return {}
    first = submit(ones(), TENSOR)
    begun = Stopwatch()
    try:
        submit(ones(), TENSOR)
    except DuplicateNameError as error:
        told = describe(error)
    else:
        raise AssertionError("the second submission was accepted")
    assert works("later")
    first.wait()
    return {**told, "begun": begun}


def test_duplicate_name_is_an_error_at_the_call() -> None:
    told = run_world(2, submit_twice)[0].value
    assert TENSOR in told["message"]
    assert "in flight on this rank" in told["message"]
    assert seconds_between(told["begun"], told["seen"]) <= 0.1
