"""In TensorFlow a dead rank and mismatches are errors on every rank, and soon."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from harness import run_world
from parallel.deaths import die, seconds_since_death
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    eagerly,
    hvd,
    in_graph,
    start,
    tf,
)

PRELOAD = ("tensorflow",)
BOUND = 1.0  # seconds from the death to the error
FORMS = {"eager": eagerly, "graph": in_graph}


def make_step(form: str, variables: list[Any]) -> Any:
    def step() -> Any:
        with hvd.DistributedGradientTape() as tape:
            loss = sum(tf.reduce_sum(variable**2) for variable in variables)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.001 * gradient)
        return hvd.allreduce(loss, name="loss")

    return FORMS[form](step)


def killed(form: str, victim: int, noted: str) -> dict[str, Any]:
    start()
    variables = [tf.Variable(tf.ones([1000, i + 1])) for i in range(12)]
    step = make_step(form, variables)
    number = 0
    while True:
        number += 1
        if number == 30 and hvd.rank() == victim:
            time.sleep(0.2)  # the others wait inside a collective
            die(noted)
        try:
            step()
        except tf.errors.OpError as error:
            seconds = seconds_since_death(noted)
            ours = isinstance(error, hvd.HorovodInternalError)
            assert ours == (form == "eager"), type(error)
            return {"kind": type(error).__name__, "message": str(error), "late": seconds}


@pytest.mark.parametrize(("form", "victim"), [("eager", 2), ("graph", 0)])
def test_killed_rank_is_named_by_every_survivor(form: str, victim: int, tmp_path: Path) -> None:
    noted = tmp_path / "died"
    results = run_world(3, killed, form, victim, str(noted), env=ENVIRONMENT, expect_failure=True)
    assert results[victim].returncode == -9
    for result in results:
        if result.rank != victim:
            assert result.returncode == 0, result.stderr
            error = result.value
            assert error["kind"] == "AbortedError", error
            assert f"rank {victim}" in error["message"] and "died" in error["message"]
            assert error["late"] <= BOUND


def disagree() -> dict[str, list[dict[str, Any]]]:
    start()
    hvd.barrier()
    odd = hvd.rank() == 1
    variable = tf.Variable(tf.ones([3 + odd]), name="layer.variable")
    cases = {
        "dtype": lambda: hvd.allreduce(
            tf.ones([3], tf.int32 if odd else tf.float32), name="layer.dtype"
        ),
        "wire": lambda: hvd.allreduce(
            tf.ones([3]),
            compression=hvd.Compression.fp16 if odd else hvd.Compression.none,
            name="layer.wire",
        ),
        "kind": lambda: (
            hvd.allgather(tf.ones([3]), name="layer.kind")
            if odd
            else hvd.allreduce(tf.ones([3]), name="layer.kind")
        ),
        "variable": lambda: hvd.broadcast_([variable], 0, "layer.variable"),
        "exchanged": lambda: hvd.alltoall(tf.ones([2, 3 + odd]), name="layer.exchanged"),
        "scattered": lambda: hvd.reducescatter(tf.ones([2, 3 + odd]), name="layer.scattered"),
        "one of many": lambda: hvd.grouped_allgather(
            [tf.ones([2]), tf.ones([2, 2 + odd])], name="layer.one of many"
        ),
    }
    return {form: outcomes_of(cases, call) for form, call in FORMS.items()}


def outcomes_of(cases: dict[str, Any], form: Any) -> list[dict[str, Any]]:
    outcomes = []
    for name, case in cases.items():
        try:
            form(case)()
        except tf.errors.OpError as error:
            outcomes.append(
                {
                    "kind": type(error).__name__,
                    "expected": isinstance(error, tf.errors.FailedPreconditionError),
                    "ours": isinstance(error, hvd.MismatchError),
                    "copied": str(pickle.loads(pickle.dumps(error))),
                    "message": str(error),
                    "name": name,
                }
            )
        assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="works")) == hvd.size()
    return outcomes


def test_mismatch_is_an_error_on_every_rank_and_the_world_goes_on() -> None:
    for result in run_world(2, disagree, env=ENVIRONMENT):
        for form, outcomes in result.value.items():
            assert len(outcomes) == 7, [error["name"] for error in outcomes]
            for error in outcomes:
                assert error["kind"] == "FailedPreconditionError" and error["expected"], error
                assert error["ours"] == (form == "eager")
                assert error["copied"] == error["message"]
                assert f"layer.{error['name']}" in error["message"], error
                assert "rank 0" in error["message"] and "rank 1" in error["message"], error


def one_of_many_disagrees() -> str:
    """One gradient of many has a different shape here; the others still run, and all end."""
    start()
    variables = [tf.Variable(tf.ones([3 + (i == 5) * hvd.rank()])) for i in range(20)]
    try:
        make_step("graph", variables)()
    except tf.errors.FailedPreconditionError as error:
        return str(error)
    raise AssertionError("the disagreement was not noticed")


def test_one_mismatch_among_many_in_flight_ends_the_step() -> None:
    for result in run_world(2, one_of_many_disagrees, env=ENVIRONMENT):
        assert "step.gradients.0.5" in result.value


def waits_for_a_barrier(form: str) -> str:
    """Rank 0 reduces, and rank 1 waits in a barrier: neither can go on."""
    start()
    reduce = FORMS[form](lambda: hvd.allreduce(tf.ones([4]), name="loss"))
    try:
        (reduce if hvd.rank() == 0 else hvd.barrier)()
    except (tf.errors.OpError, hvd.HvdliteError) as error:
        return str(error)
    return "nothing"


@pytest.mark.long
@pytest.mark.parametrize("form", list(FORMS))
def test_operations_that_wait_for_each_other_are_named(form: str) -> None:
    env = {**ENVIRONMENT, "HVDLITE_STALL_WARNING": "0.5", "HVDLITE_STALL_SHUTDOWN": "2"}
    first, second = run_world(2, waits_for_a_barrier, form, env=env)
    assert "[0] warning: rank 0 is in allreduce 'loss'; rank 1 (" in first.stderr
    assert "rank 1 waits for rank 0 in barrier" in first.stderr
    for result in (first, second):
        assert "has not called it for 2" in result.value, result.value
