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


def make_model(layer: Any) -> Any:
    keras.utils.set_random_seed(5)
    dense = [keras.layers.Dense(units, dtype="float64") for units in (8, 2)]
    return keras.Sequential([keras.Input([4]), dense[0], layer, keras.layers.ReLU(), dense[1]])


def scenario_training_equals_one_process(form: Form) -> None:
    """Each rank's loss is its part of the sum over all samples, so gradients are summed."""
    count = [4, 2, 6][: hvd.size()]
    begin = sum(count[: hvd.rank()])
    own = slice(begin, begin + count[hvd.rank()])
    inputs = tf.random.stateless_normal([sum(count), 4], [1, 2], dtype=tf.float64)
    targets = tf.sin(inputs[:, :2])

    def train(model: Any, part: slice, distributed: bool) -> list[Any]:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

        def step(inputs: Any, targets: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(inputs, training=True) - targets) ** 2) / sum(count)
            if distributed:
                tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = form(step)
        for _ in range(10):
            run(inputs[part], targets[part])
        return [variable + 0.0 for variable in model.weights]

    ours = train(make_model(hvd.SyncBatchNormalization(dtype="float64")), own, True)
    plain = keras.layers.BatchNormalization(dtype="float64")
    theirs = train(make_model(plain), slice(None), False)
    for a, b in zip(ours, theirs, strict=True):
        assert same(a, b, 1e-10), (a, b)
        assert same(hvd.broadcast(a, 0), a)


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
