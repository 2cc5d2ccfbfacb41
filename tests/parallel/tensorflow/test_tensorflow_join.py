"""Uneven numbers of batches in TensorFlow: averages are over the ranks that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.scenarios import make_tests, on_hosts
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, run_scenarios, same, tf

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]


def steps_of(rank: int, turn: int) -> int:
    return 2 * ((rank + turn) % hvd.size()) + 1


def active_in(step: int, turn: int) -> list[int]:
    return [rank for rank in range(hvd.size()) if step < steps_of(rank, turn)]


def batch_of(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).normal(size=(4, 3)).astype("float32")


def loss_of(weight: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.linalg.matmul(batch, weight) - 1.0))


def plain_gradient(weight: Any, rank: int, step: int) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(weight, batch_of(rank, step))
    return tape.gradient(loss, weight)


def scenario_tape(form: Form) -> None:
    weight = tf.Variable(tf.ones([3, 2]))
    alone = tf.Variable(tf.ones([3, 2]))

    @form
    def train(batch: Any) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), name="tape") as tape:
            loss = loss_of(weight, batch)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    for turn in range(hvd.size()):
        for step in range(max(steps_of(rank, turn) for rank in range(hvd.size()))):
            active = active_in(step, turn)
            mean = sum(plain_gradient(alone, rank, step) for rank in active) / len(active)
            alone.assign_sub(0.1 * mean)
        for step in range(steps_of(hvd.rank(), turn)):
            train(tf.constant(batch_of(hvd.rank(), step)))
        hvd.broadcast_variables([weight], root_rank=hvd.join())
        assert same(weight, alone, 1e-5)


def scenario_indexed_slices_are_averaged_over_those_who_give(form: Form) -> None:
    @form
    def reduce(indices: Any, values: Any) -> Any:
        slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([9, 2]))
        return tf.convert_to_tensor(hvd.allreduce(slices, name="slices"))

    for step in range(steps_of(hvd.rank(), 0)):
        active = active_in(step, 0)
        # Rank 0 takes part without rows.
        indices = tf.fill([2 * hvd.rank()], hvd.rank())
        result = reduce(indices, tf.ones([2 * hvd.rank(), 2]))
        expected = [[2.0 * r / len(active) if r in active else 0.0] * 2 for r in range(9)]
        assert same(result, expected, 1e-6), result
    hvd.join()


def scenario_join_in_a_function_is_refused() -> None:
    with pytest.raises(hvd.ArgumentError, match="outside of tf.function"):
        tf.function(hvd.join)()


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tensorflow_join = make_tests(body, on_hosts([0, 0, 1]), env=ENVIRONMENT)
