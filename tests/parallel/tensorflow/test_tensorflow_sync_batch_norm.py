"""SyncBatchNormalization equals Keras's BatchNormalization on the union of the batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallel.scenarios import make_tests, sizes, tensors_sent_by
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    eagerly,
    hvd,
    keras,
    run_scenarios,
    same,
    tf,
)

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]


def scenario_moments_gradients_and_moving_averages(form: Form) -> None:
    """Outputs, moving averages and gradients are those of one process on all samples."""
    # TensorFlow 2.16 prunes the gradient of an empty batch from a function, as the class says.
    empty = 0 if form is eagerly or not tf.__version__.startswith("2.16.") else 2
    count = [4, empty, 3][: hvd.size()]
    begin = sum(count[: hvd.rank()])
    values = 100 + tf.random.stateless_normal([sum(count), 5, 3], [1, 2], dtype=tf.float64)
    keep = tf.random.stateless_uniform([sum(count), 5], [3, 4]) < 0.7
    factors = tf.random.stateless_normal([sum(count), 5, 3], [5, 6], dtype=tf.float64)
    own = slice(begin, begin + count[hvd.rank()])

    def outcome(layer: Any, part: slice, masked: bool) -> list[Any]:
        def step(x: Any, keep: Any, factors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True, mask=keep if masked else None)
                loss = tf.reduce_sum(y * factors)
            return [y, *tape.gradient(loss, [x, layer.gamma, layer.beta])]

        layer.build([None, 5, 3])
        y, x, gamma, beta = form(step)(values[part], keep[part], factors[part])
        return [y, x, gamma, beta, layer.moving_mean + 0.0, layer.moving_variance + 0.0]

    for masked in (False, True):
        ours = outcome(hvd.SyncBatchNormalization(dtype="float64"), own, masked)
        theirs = outcome(keras.layers.BatchNormalization(dtype="float64"), slice(None), masked)
        for i in (0, 1):
            theirs[i] = theirs[i][own]
        for i in (2, 3):
            ours[i] = hvd.allreduce(ours[i], op=hvd.Sum)
        # Keras's masked moments divide by the count plus 1e-7.
        for a, b in zip(ours, theirs, strict=True):
            assert same(a, b, 1e-4 if masked else 1e-9), (masked, a, b)


def scenario_saved_and_loaded() -> None:
    layer = hvd.SyncBatchNormalization(momentum=0.7, axis=-1)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is hvd.SyncBatchNormalization and again.momentum == 0.7
    with pytest.raises(hvd.ArgumentError, match="leave it out"):
        hvd.SyncBatchNormalization(synchronized=True)


def scenario_inference_sends_nothing(form: Form) -> None:
    layer = hvd.SyncBatchNormalization()
    layer.build([None, 3])
    run = form(lambda x: layer(x, training=False))
    assert tensors_sent_by(lambda: run(tf.ones([2, 3]))) == 0


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_sync_batch_norm = make_tests(body, sizes(3), env=ENVIRONMENT)
