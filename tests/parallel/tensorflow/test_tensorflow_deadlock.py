"""In TensorFlow, too, ranks that wait for each other get an error; ranks that are late do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from harness import run_world
from launcher import run_launcher
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, eagerly, hvd, in_graph, start, tf
from pythons import python_with

PRELOAD = ("tensorflow",)
pytestmark = pytest.mark.long
GRACE = {**ENVIRONMENT, "HVDLITE_DEADLOCK_GRACE": "0.2", "HVDLITE_STALL_SHUTDOWN": "60"}
LATE = 3.0  # seconds, longer than such a grace and all that is waited for beyond it
FORMS = {"eager": eagerly, "graph": in_graph}


def same_on_all() -> bool:
    return float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="works")) == hvd.size()


def caught(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except (tf.errors.OpError, hvd.DeadlockError) as error:
        ours = isinstance(error, hvd.DeadlockError)
        return {"kind": type(error).__name__, "message": str(error), "ours": ours}
    return {"kind": "none"}


def against(form: str, other: str) -> dict[str, Any]:
    """Rank 0 reduces, and rank 1 does something else."""
    start()
    assert same_on_all()
    reduce = FORMS[form](lambda: hvd.allreduce(tf.ones([4]), name="loss"))
    others: dict[str, Callable[[], Any]] = {
        "barrier": hvd.barrier,
        "gather": FORMS[form](lambda: hvd.allgather(tf.ones([4]), name="rows")),
    }
    said = caught(reduce if hvd.rank() == 0 else others[other])
    assert same_on_all()
    return said


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("other", "told"), [("barrier", "barrier"), ("gather", "allgather")])
def test_operations_that_wait_for_each_other_fail(form: str, other: str, told: str) -> None:
    for result in run_world(2, against, form, other, env=GRACE):
        said = result.value
        assert "deadlock: " in said["message"], said
        assert "rank 0 waits for rank 1 in allreduce 'loss'" in said["message"], said
        assert f"rank 1 waits for rank 0 in {told}" in said["message"], said
        python_waits = other == "barrier" and result.rank == 1
        assert said["ours"] == (form == "eager" or python_waits), said
        assert "has waited" not in result.stderr


def two_at_once(body: Callable[[Any], Any]) -> bool:
    """Rank 0 submits `a` in a function in which `b` comes later; rank 1 waits for `b` first."""
    start()
    assert same_on_all()

    def reduce(name: str, value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Sum, name=name)

    @tf.function  # type: ignore[untyped-decorator]
    def both(x: Any) -> Any:
        return reduce("a", x) + reduce("b", body(x))

    x = tf.ones([])
    if hvd.rank() == 0:
        both(x)
    else:
        reduce("b", x)
        reduce("a", x)
    return same_on_all()


def sleeps_in_python(x: Any) -> Any:
    def sleep(value: Any) -> Any:
        time.sleep(LATE)
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), [])


def computes(x: Any) -> Any:
    until = tf.timestamp() + LATE
    while tf.timestamp() < until:
        x = tf.cos(x)
    return x


@pytest.mark.parametrize("body", [sleeps_in_python, computes])
def test_a_function_that_still_works_is_not_a_deadlock(body: Any) -> None:
    assert all(result.value for result in run_world(2, two_at_once, body, env=GRACE))


def late_data(sleeps: str) -> bool:
    """Rank 1 waits in a reduction for rank 0, whose data come late."""
    from tensorflow.python.data.experimental.ops.testing import sleep

    start()
    assert same_on_all()

    def wait(row: Any) -> Any:
        time.sleep(LATE / 2)
        return row

    rows = tf.data.Dataset.range(2)
    if hvd.rank() == 0 and sleeps == "native":
        rows = rows.apply(sleep(int(1e6 * LATE / 2)))
    elif hvd.rank() == 0:
        rows = rows.map(lambda row: tf.numpy_function(wait, [row], tf.int64))

    @tf.function  # type: ignore[untyped-decorator]
    def train(rows: Any) -> None:
        for row in rows.prefetch(1):
            hvd.allreduce(tf.cast(row, tf.float32), name="row")

    train(rows)
    return same_on_all()


@pytest.mark.parametrize("sleeps", ["native", "python"])
def test_late_data_are_not_a_deadlock(sleeps: str) -> None:
    assert all(result.value for result in run_world(2, late_data, sleeps, env=GRACE))


def computes_between() -> bool:
    """Both ranks reduce the same things; rank 1 is busy, or asleep, before it does."""
    start()
    assert same_on_all()
    if hvd.rank() == 1:
        time.sleep(LATE)
    hvd.allreduce(tf.ones([4]), name="loss")
    if hvd.rank() == 1:
        until = time.monotonic() + LATE
        while time.monotonic() < until:
            pass
    hvd.barrier()
    return same_on_all()


def test_a_rank_that_is_late_is_not_in_a_deadlock() -> None:
    assert all(result.value for result in run_world(2, computes_between, env=GRACE))


ELASTIC = """
import tensorflow as tf
import hvdlite.tensorflow as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    print("call", hvd.rank(), flush=True)
    for state.step in range(state.step, 3):
        hvd.allreduce(tf.ones([2]), name="gradient")
        state.commit()
    if hvd.rank() == 0:
        hvd.barrier()
    else:
        hvd.allreduce(tf.ones([2]), name="loss")

train(hvd.elastic.TensorFlowState([tf.Variable(1.0)], step=0))
"""


def test_workers_of_an_elastic_job_are_told_of_a_deadlock() -> None:
    python = python_with("tensorflow", "sklearn.datasets", **ENVIRONMENT)  # the example's
    result = run_launcher(
        *("-np", "2", "--min-np", "2", "--max-np", "2", python, "-c", ELASTIC),
        env={**GRACE, "OMP_NUM_THREADS": "1"},
    )
    # Usually both workers raise it. If the first one has gone before the other has read its answer,
    # the other goes on with a new worker, as after any exception.
    assert "DeadlockError: deadlock: rank " in result.stderr, result.stderr
