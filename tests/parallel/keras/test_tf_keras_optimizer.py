"""DistributedOptimizer with tf_keras: several batches per update, loss scaling, wrapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parallel.keras.keras_worlds import (
    Later,
    data,
    environment,
    hvd,
    mine,
    run_scenarios,
    same_bits,
)
from parallel.keras.tf_keras_worlds import (
    adam,
    dense_model,
    fit_on_all_ranks_and_alone,
    k2,
    legacy_adam,
    legacy_sgd,
    sgd,
    weights_of,
)
from parallel.scenarios import make_tests, sizes, tensors_sent_by

pytestmark = pytest.mark.long

PRELOAD = ("tf_keras",)
tf: Any = Later("tensorflow")


def scenario_passes_are_averaged() -> None:
    fit_on_all_ranks_and_alone(adam, passes=2)


def scenario_passes_are_summed() -> None:
    fit_on_all_ranks_and_alone(sgd, passes=3, average=False)


def scenario_passes_eagerly() -> None:
    fit_on_all_ranks_and_alone(sgd, passes=2, run_eagerly=True)


def scenario_passes_of_legacy() -> None:
    fit_on_all_ranks_and_alone(legacy_adam, passes=2)


def mixed_model(optimizer: Any, **how: Any) -> Any:
    """Make and compile a model under "mixed_float16", which adds a LossScaleOptimizer."""
    k2.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = dense_model()
        model.compile(optimizer=optimizer, loss="mse", **how)
    finally:
        k2.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, k2.mixed_precision.LossScaleOptimizer)
    return model


def fit_with_a_bad_batch(optimizer: Any, **how: Any) -> None:
    """One rank's third batch of four is infinite: all ranks skip that update, and only that."""
    model = mixed_model(optimizer, **how)
    inputs, targets = data(16 * hvd.size())
    inputs, targets = mine(inputs).copy(), mine(targets)
    if hvd.rank() == 0:
        inputs[8] = np.inf
    scale = float(model.optimizer.loss_scale)
    count = tensors_sent_by(
        lambda: model.fit(inputs, targets, batch_size=4, shuffle=False, verbose=0)
    )
    assert count == 4 * len(model.trainable_variables)
    assert float(model.optimizer.loss_scale) == scale / 2
    assert all(np.isfinite(weight).all() for weight in weights_of(model))
    assert same_bits(weights_of(model))


def scaled(optimizer: Any) -> Any:
    return k2.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2.0**8)


def scenario_loss_scaling_inside() -> None:
    for make in (sgd, legacy_adam):
        fit_with_a_bad_batch(hvd.DistributedOptimizer(scaled(make())))


def scenario_loss_scaling_outside() -> None:
    for make in (sgd, legacy_adam):
        fit_with_a_bad_batch(scaled(hvd.DistributedOptimizer(make())))


def scenario_loss_scaling_eagerly() -> None:
    fit_with_a_bad_batch(scaled(hvd.DistributedOptimizer(adam())), run_eagerly=True)


def scenario_loss_scaling_that_compile_adds() -> None:
    model = mixed_model(hvd.DistributedOptimizer(sgd()))
    model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    inputs, targets = (mine(part) for part in data(8 * hvd.size()))
    how = {"batch_size": 4, "verbose": 0}
    model.fit(inputs, targets, callbacks=callbacks, **how)
    assert same_bits(weights_of(model))
    count = tensors_sent_by(lambda: model.fit(inputs, targets, **how))
    assert count == 2 * len(model.trainable_variables)


def scenario_keeps_its_class() -> None:
    for make in (adam, legacy_adam):
        optimizer = make()
        plain, config = type(optimizer), k2.optimizers.serialize(optimizer)
        hvd.DistributedOptimizer(optimizer)
        assert optimizer.__class__ is plain and type(optimizer).__name__ == "Adam"
        assert k2.optimizers.serialize(optimizer) == config
        stray = type(optimizer).from_config(optimizer.get_config())
        with pytest.raises(hvd.ArgumentError, match="wrap it"):
            stray.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])


def scenario_misuse_says_what_to_do() -> None:
    for make in (sgd, legacy_sgd):
        optimizer = hvd.DistributedOptimizer(make())
        for again in (optimizer, scaled(optimizer)):
            with pytest.raises(hvd.ArgumentError, match="already"):
                hvd.DistributedOptimizer(again)
        for arguments, text in (
            ({"op": hvd.Max}, "op=hvd.Max makes no gradient"),
            ({"backward_passes_per_step": 0}, "at least 1"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "combined with op=hvd.Sum"),
        ):
            with pytest.raises(hvd.ArgumentError, match=text):
                hvd.DistributedOptimizer(make(), **arguments)
        scaler = scaled(hvd.DistributedOptimizer(make(), backward_passes_per_step=2))
        model = dense_model()
        model.compile(optimizer=scaler, loss="mse", run_eagerly=True)
        with pytest.raises(hvd.ArgumentError, match="does not work with the loss scaling"):
            model.fit(*data(4), verbose=0)
        optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2)
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
        with pytest.raises(hvd.ArgumentError, match="of its first step only"):
            optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    with pytest.raises(hvd.ArgumentError, match="one of tf_keras"):
        hvd.DistributedOptimizer(k2.layers.Dense(1))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tf_keras_optimizer = make_tests(body, sizes(2), env=environment("tensorflow"))
