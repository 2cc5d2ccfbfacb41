"""Compression.int8 in TensorFlow and Keras has the bits of its reference, on two hosts."""

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
    tf,
)
from references.int8_between_hosts import allreduce as reference

PRELOAD = ("tensorflow",)

pytestmark = pytest.mark.long

Form = Callable[[Callable[..., Any]], Callable[..., Any]]


def arrays(rank: int) -> list[Any]:
    numbers = np.random.default_rng(rank)
    return [numbers.normal(size=shape).astype("float32") for shape in ((40, 20), (257,), (1,))]


def means() -> list[Any]:
    everyone = zip(*[arrays(rank) for rank in range(hvd.size())], strict=True)
    return [reference(column, range(hvd.size())) for column in everyone]


def assert_equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a.numpy() if hasattr(a, "numpy") else a, b)


def scenario_allreduce(form: Form) -> None:
    mine, int8 = [tf.constant(one) for one in arrays(hvd.rank())], hvd.Compression.int8
    assert_equal(form(lambda: hvd.grouped_allreduce(mine, compression=int8))(), means())
    assert_equal(form(lambda: [hvd.allreduce(one, compression=int8) for one in mine])(), means())
    doubles = tf.cast(mine[0], tf.float64)
    exact = hvd.allreduce(doubles)
    assert np.array_equal(form(lambda: hvd.allreduce(doubles, compression=int8))(), exact)


def scenario_gradient_tape(form: Form) -> None:
    variables = [tf.Variable(tf.zeros_like(one)) for one in arrays(0)]
    table = tf.Variable(tf.zeros([30, 3]))

    def gradients() -> list[Any]:
        with hvd.DistributedGradientTape(compression=hvd.Compression.int8) as tape:
            weights = arrays(hvd.rank())
            loss = sum(
                tf.reduce_sum(one * by) for one, by in zip(variables, weights, strict=True)
            ) + tf.reduce_sum(tf.gather(table, [hvd.rank(), 7]))
        found: list[Any] = tape.gradient(loss, [*variables, table])
        return found

    *dense, rows = form(gradients)()
    assert_equal(dense, means())
    expected = np.zeros((30, 3))
    for rank in range(hvd.size()):
        expected[[rank, 7]] += 1 / hvd.size()
    assert np.array_equal(tf.convert_to_tensor(rows), expected)  # rows travel as they are


def scenario_compiled_by_xla() -> None:
    mine = [tf.constant(one) for one in arrays(hvd.rank())]
    compiled = tf.function(
        lambda: hvd.grouped_allreduce(mine, name="xla", compression=hvd.Compression.int8),
        jit_compile=True,
    )
    assert_equal(compiled(), means())


def scenario_keras() -> None:
    import hvdlite.keras as hvd_keras

    int8 = hvd_keras.Compression.int8
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=int8)
    variables = [keras.Variable(np.zeros_like(one)) for one in arrays(0)]
    optimizer.apply([tf.constant(one) for one in arrays(hvd.rank())], variables)
    assert_equal([one.value for one in variables], [-mean for mean in means()])
    assert_equal([hvd_keras.allreduce(arrays(hvd.rank())[0], compression=int8)], means()[:1])


def scenario_refusals() -> None:
    with pytest.raises(Exception, match="int8 between hosts goes with an allreduce by sum or"):
        hvd.allreduce(tf.ones(3), op=hvd.Max, name="most", compression=hvd.Compression.int8)
    with pytest.raises(hvd.HvdliteError, match="Compression.int8 packs what an allreduce by"):
        hvd.reducescatter(tf.ones(4), compression=hvd.Compression.int8)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_int8 = make_tests(body, on_hosts([0, 1]), env=ENVIRONMENT)
