"""Uneven numbers of batches in TensorFlow and Keras, Adasum, and the merging of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.scenarios import make_tests, on_hosts
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    keras,
    run_scenarios,
    same,
    tf,
)

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


def scenario_keras_optimizer(form: Form) -> None:
    weight = keras.Variable(np.ones([3, 2], "float32"))
    alone = tf.Variable(tf.ones([3, 2]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([weight])

    @form
    def train(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(weight.value, batch)
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])

    for turn in range(2):
        for step in range(max(steps_of(rank, turn) for rank in range(hvd.size()))):
            active = active_in(step, turn)
            mean = sum(plain_gradient(alone, rank, step) for rank in active) / len(active)
            alone.assign_sub(0.1 * mean)
        for step in range(steps_of(hvd.rank(), turn)):
            train(tf.constant(batch_of(hvd.rank(), step)))
        hvd.broadcast_variables([weight.value], root_rank=hvd.join())
        assert same(weight.value, alone, 1e-5)


def scenario_operations_while_some_have_joined(form: Form) -> None:
    gather, reduce = form(hvd.allgather), form(lambda x: hvd.allreduce(x, op=hvd.Max))
    for turn in range(hvd.size()):
        for step in range(steps_of(hvd.rank(), turn)):
            active = active_in(step, turn)
            mine = tf.fill([hvd.rank() + 1], hvd.rank())
            everything = [rank for rank in active for _ in range(rank + 1)]
            assert gather(mine).numpy().tolist() == everything
            assert reduce(tf.constant(hvd.rank())).numpy() == active[-1]
            assert hvd.broadcast(tf.constant(hvd.rank()), active[0]).numpy() == active[0]
            splits = [int(rank in active) for rank in range(hvd.size())]
            rows, received = hvd.alltoall(tf.fill([len(active)], hvd.rank()), splits)
            assert rows.numpy().tolist() == active and received.numpy().tolist() == splits
            part = hvd.reducescatter(tf.ones([len(active)]), op=hvd.Sum)
            assert part.numpy().tolist() == [len(active)]
        hvd.join()
        assert hvd.allgather(tf.constant([hvd.rank()])).numpy().tolist() == list(range(hvd.size()))


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


def scenario_equal_indices_are_sent_once(form: Form) -> None:
    @form
    def reduce() -> Any:
        slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 1, 3]))
        result = hvd.allreduce(slices, op=hvd.Sum)
        return result.indices, result.values

    indices, values = reduce()
    assert indices.numpy().tolist() == [3, 1] * hvd.size()
    assert values.numpy().ravel().tolist() == [5.0, 2.0] * hvd.size()


def scenario_join_in_a_function_is_refused() -> None:
    with pytest.raises(hvd.ArgumentError, match="outside of tf.function"):
        tf.function(hvd.join)()


def adasum(vectors: list[Any]) -> Any:
    while len(vectors) > 1:
        pairs = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=False):
            dot = (a * b).sum()
            pairs.append(a * (1 - dot / (2 * (a * a).sum())) + b * (1 - dot / (2 * (b * b).sum())))
        vectors = pairs + ([vectors[-1]] if len(vectors) % 2 else [])
    return vectors[0]


def vector_of(rank: int, seed: int = 0) -> Any:
    return np.random.default_rng([rank, seed]).normal(size=(5, 3))


def scenario_adasum(form: Form) -> None:
    wanted = [adasum([vector_of(rank, seed) for rank in range(hvd.size())]) for seed in (0, 1)]
    tensors = [tf.constant(vector_of(hvd.rank(), seed)) for seed in (0, 1)]
    assert same(form(lambda x: hvd.allreduce(x, op=hvd.Adasum))(tensors[0]), wanted[0], 1e-12)
    pair = form(lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Adasum))(*tensors)
    for result, expected in zip(pair, wanted, strict=True):
        assert same(result, expected, 1e-12)


def scenario_adasum_of_gradients(form: Form) -> None:
    source = tf.Variable(tf.zeros([5, 3], tf.float64))
    wanted = adasum([vector_of(rank) for rank in range(hvd.size())])
    mine = tf.constant(vector_of(hvd.rank()))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(source * mine)
        return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, source)

    assert same(form(step)(), wanted, 1e-12)
    weight = keras.Variable(np.zeros([5, 3]), dtype="float64")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    optimizer.build([weight])
    form(lambda: optimizer.apply([mine], [weight]))()
    assert same(-weight.value, wanted, 1e-6)


def body() -> dict[str, str]:
    return run_scenarios(globals())


WORLDS = [[0, 0], [0, 0, 1]]


test_tensorflow_join = make_tests(body, on_hosts(*WORLDS), env=ENVIRONMENT)
