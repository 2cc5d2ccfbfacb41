"""In TensorFlow the stall report names ranks that wait for each other, and ends the job.

Threads of Python that wait outside of TensorFlow get an error at once, as without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from harness import run_world
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, eagerly, hvd, in_graph, start, tf

PRELOAD = ("tensorflow",)
pytestmark = pytest.mark.long
GRACE = {**ENVIRONMENT, "HVDLITE_DEADLOCK_GRACE": "0.2", "HVDLITE_STALL_SHUTDOWN": "60"}
STALL = {**GRACE, "HVDLITE_STALL_WARNING": "0.5", "HVDLITE_STALL_SHUTDOWN": "2"}
LATE = 3.0  # seconds, longer than such a grace and all that is waited for beyond it
FORMS = {"eager": eagerly, "graph": in_graph}


def same_on_all() -> bool:
    return float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="works")) == hvd.size()


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except (tf.errors.OpError, hvd.HvdliteError) as error:
        return str(error)
    return "nothing"


def against(form: str, other: str) -> str:
    """Rank 0 reduces, and rank 1 does something else."""
    start()
    assert same_on_all()
    reduce = FORMS[form](lambda: hvd.allreduce(tf.ones([4]), name="loss"))
    others: dict[str, Callable[[], Any]] = {
        "barrier": hvd.barrier,
        "gather": FORMS[form](lambda: hvd.allgather(tf.ones([4]), name="rows")),
    }
    return caught(reduce if hvd.rank() == 0 else others[other])


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("other", "told"), [("barrier", "barrier"), ("gather", "allgather")])
def test_operations_that_wait_for_each_other_are_named(form: str, other: str, told: str) -> None:
    first, second = run_world(2, against, form, other, env=STALL)
    warnings = [
        one for one in first.stderr.splitlines() if "[0] warning: rank 0 is in allreduce" in one
    ]
    line = warnings[0]
    assert "rank 0 is in allreduce 'loss'; rank 1 (" in line, first.stderr
    assert "has not called it for 0." in line, first.stderr
    assert f"rank 1 waits for rank 0 in {told}" in line, first.stderr
    for result in (first, second):
        assert "has not called it for 2" in result.value, result.value


def barrier_against_objects() -> str:
    start()
    assert same_on_all()
    said = caught(hvd.barrier if hvd.rank() == 0 else lambda: hvd.allgather_object("x", name="x"))
    assert same_on_all()
    return said


def test_threads_of_python_that_wait_for_each_other_fail_at_once() -> None:
    for result in run_world(2, barrier_against_objects, env=GRACE):
        assert "deadlock: rank " in result.value, result.value
        assert "rank 0 waits for rank 1 in barrier" in result.value, result.value


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
