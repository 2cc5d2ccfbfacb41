"""TensorFlowState over several ranks, and the errors of graphs under hvd.elastic.run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from harness import run_world
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, start, tf

PRELOAD = ("tensorflow",)


def values_of(state: Any) -> list[Any]:
    return [variable.numpy().tolist() for variable in state.variables]


def check_state() -> Any:
    mine = [tf.Variable([hvd.rank() + 1.0, 2.0]), tf.Variable(hvd.rank(), dtype=tf.int64)]
    state = hvd.elastic.TensorFlowState(mine, step=hvd.rank())
    state.sync()
    assert (values_of(state), state.step) == ([[1.0, 2.0], 0], 0)
    for restored in ([[1.0, 2.0], 0], [[7.0, 7.0], 0]):
        state.variables[0].assign([7.0, 7.0])
        if restored[0] == [7.0, 7.0]:
            state.commit()
            state.variables[0].assign([8.0, 8.0])
        state.step = 5
        state.restore()
        assert (values_of(state), state.step) == (restored, 0)
    return state


def check_refusals() -> None:
    with pytest.raises(hvd.UnsupportedError, match="works eagerly, without a session"):
        hvd.elastic.TensorFlowState([], session=object())
    with pytest.raises(hvd.ArgumentError, match="no global variables"):
        hvd.elastic.TensorFlowState(step=0)


def train_until_a_rank_dies(compiles: bool) -> str:
    start()
    state = check_state()
    check_refusals()
    reduce = tf.function(lambda x: hvd.allreduce(x, name="gradient"), jit_compile=compiles)

    @hvd.elastic.run
    def train(state: Any) -> None:
        for step in range(3):
            reduce(state.variables[0].value())
            if step == 1 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(hvd.HorovodInternalError) as failed:
        train(state)
    return f"{failed.value} {getattr(failed.value, '__notes__', '')}"


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.long)])
def test_state_and_the_error_of_a_graph(compiles: bool) -> None:
    survivor, victim = run_world(
        2, train_until_a_rank_dies, compiles, env=ENVIRONMENT, expect_failure=True
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    assert survivor.value is not None, survivor.stderr
    assert "rank 1 died" in survivor.value
    assert "--min-np" in survivor.value + survivor.stderr
