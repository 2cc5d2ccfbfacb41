"""Callbacks, saving and loading with models of Keras 2, the package tf_keras."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from parallel.keras.callback_fits import stop_in_fit
from parallel.keras.keras_worlds import (
    data,
    environment,
    hvd,
    keras,
    mine,
    on_every_rank,
    run_scenarios,
    same_bits,
    start,
)
from parallel.keras.tf_keras_worlds import (
    BATCH,
    BATCHES,
    EPOCHS,
    adam,
    close,
    dense_model,
    k2,
    legacy_adam,
    legacy_sgd,
    sgd,
    weights_of,
)
from parallel.scenarios import make_tests, sizes, tensors_sent_by

pytestmark = pytest.mark.long

PRELOAD = ("tf_keras",)


def scenario_saves_and_loads_with_its_state() -> None:
    for make, name in ((adam, "model.keras"), (adam, "model.h5"), (legacy_adam, "model.h5")):
        model = dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse")
        inputs, targets = (mine(part) for part in data(12 * hvd.size()))
        how = {"batch_size": 4, "shuffle": False, "verbose": 0}
        model.fit(inputs, targets, **how)
        with tempfile.TemporaryDirectory() as folder:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Keras's own warning about the older format
                model.save(Path(folder) / name)
            loaded = k2.models.load_model(Path(folder) / name)
        assert type(loaded.optimizer) is model.optimizer.__class__
        assert int(loaded.optimizer.iterations) == 3
        hvd.DistributedOptimizer(loaded.optimizer)
        # The loaded optimizer goes on exactly as the saved one.
        count = tensors_sent_by(
            lambda model=loaded, x=inputs, y=targets, how=how: model.fit(x, y, **how)
        )
        assert count == 3 * 4
        model.fit(inputs, targets, **how)
        assert close(weights_of(model), weights_of(loaded), 0.0)


def fit_with_callbacks(make: Callable[[], Any], folder: Path) -> None:
    model, alone = dense_model(), dense_model()
    if hvd.rank() > 0:
        model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
    optimizer = hvd.DistributedOptimizer(make())
    inputs, targets = data(BATCH * BATCHES * hvd.size())
    best = folder / f"best{hvd.rank()}.keras"
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
        hvd.callbacks.BestModelCheckpoint(str(best), monitor="val_loss"),
    ]
    how = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    history = model.fit(
        mine(inputs), mine(targets), batch_size=BATCH, callbacks=callbacks,
        validation_data=(mine(inputs), mine(targets)), **how,
    ).history  # fmt: skip
    assert same_bits(weights_of(model))
    assert all(one == history for one in on_every_rank(history))
    assert np.allclose(history["learning_rate"], 0.05)
    # The same on one process, with the rates of the warm-up.
    size, done = hvd.size(), 0
    expected = make()

    def rate(batch: int, logs: Any) -> None:
        nonlocal done
        if done > 0:
            scale_velocities(expected, alone, ratio(done + 1) / ratio(done))
        done += 1
        expected.learning_rate = 0.05 * ratio(done)

    def ratio(batches: int) -> float:
        return min(1.0, (1 + batches / BATCHES * (size - 1)) / size)

    alone.compile(optimizer=expected, loss="mse", metrics=["mae"])
    theirs = alone.fit(
        inputs, targets, batch_size=BATCH * size, validation_data=(inputs, targets),
        callbacks=[k2.callbacks.LambdaCallback(on_batch_begin=rate)], **how,
    ).history  # fmt: skip
    assert close(weights_of(model), weights_of(alone))
    for key in theirs:
        assert np.allclose(history[key], theirs[key], rtol=1e-4), key
    assert best.exists() == (hvd.rank() == 0)


def scale_velocities(optimizer: Any, model: Any, by: float) -> None:
    """Scale by hand as the callback does: velocities hold gradients times the last rate."""
    if isinstance(optimizer, k2.optimizers.legacy.SGD):
        velocities = [optimizer.get_slot(one, "momentum") for one in model.trainable_variables]
    else:
        velocities = optimizer.momentums
    for velocity in velocities:
        velocity.assign(velocity * by)


def scenario_callbacks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit_with_callbacks(sgd, Path(folder))


def scenario_callbacks_legacy() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit_with_callbacks(legacy_sgd, Path(folder))


def scenario_broadcasts_what_the_first_batch_builds() -> None:
    k2.utils.set_random_seed(hvd.rank())
    model = k2.Sequential([k2.layers.Dense(3), k2.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(legacy_adam()), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1)]
    inputs, targets = (mine(part) for part in data(8 * hvd.size()))
    model.fit(inputs, targets, batch_size=4, callbacks=callbacks, verbose=0)
    assert same_bits([*weights_of(model), *(one.numpy() for one in model.optimizer.variables())])


def scenario_callbacks_refuse_schedules() -> None:
    for family in (k2.optimizers, k2.optimizers.legacy):
        model = dense_model()
        schedule = k2.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        model.compile(optimizer=hvd.DistributedOptimizer(family.SGD(schedule)), loss="mse")
        warmup = hvd.callbacks.LearningRateWarmupCallback(None)
        with pytest.raises(hvd.ArgumentError, match="give the optimizer a number"):
            model.fit(*data(4), callbacks=[warmup], verbose=0)


def scenario_warmup_of_a_model_that_the_first_batch_builds() -> None:
    inputs, targets = (mine(part) for part in data(8 * hvd.size()))
    for make in (sgd, adam, legacy_sgd, legacy_adam):  # `scenario_callbacks` has built models.
        k2.utils.set_random_seed(3)
        model = k2.Sequential([k2.layers.Dense(3), k2.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse")
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1)
        history = model.fit(inputs, targets, batch_size=4, callbacks=[warmup], verbose=0).history
        assert np.isclose(history["learning_rate"], 0.05)


def scenario_broadcast_variables() -> None:
    model = dense_model()
    model.set_weights([weight * 0 + hvd.rank() for weight in weights_of(model)])
    hvd.broadcast_variables(model.weights, root_rank=hvd.size() - 1)
    assert all((weight == hvd.size() - 1).all() for weight in weights_of(model))


def scenario_ranks_whose_epochs_differ() -> None:
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    inputs, targets = data(8 + 4 * hvd.rank())
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    with pytest.raises(hvd.ArgumentError, match="different numbers of batches per epoch"):
        model.fit(inputs, targets, batch_size=4, callbacks=callbacks, verbose=0)


def scenario_evaluate_averages_as_fit_does() -> None:
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse", metrics=["mae"])
    inputs, targets = data(12 * hvd.size())
    how = {"batch_size": 4, "verbose": 0, "return_dict": True}
    hvd.broadcast_variables(model.weights)
    expected = model.evaluate(inputs, targets, **how)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    found = model.evaluate(mine(inputs), mine(targets), callbacks=callbacks, **how)
    assert found == pytest.approx(expected, rel=1e-5)
    own = model.evaluate(mine(inputs), mine(targets), **how)
    assert len(set(on_every_rank(own["mae"]))) == hvd.size()


def scenario_models_that_differ_are_warned_of() -> None:
    inputs, targets = (mine(part) for part in data(12 * hvd.size()))

    def said(optimizer: Any, callbacks: list[Any], built: bool = True) -> list[str]:
        model = dense_model()
        model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
        if not built:
            k2.utils.set_random_seed(hvd.rank())
            model = k2.Sequential([k2.layers.Dense(3), k2.layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.fit(inputs, targets, batch_size=4, callbacks=callbacks, verbose=0)
        kind = hvd.ReplicasDifferWarning
        return [str(one.message) for one in caught if one.category is kind]

    metric = hvd.callbacks.MetricAverageCallback()
    both = [metric, hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    expected = 2 * (hvd.rank() == 0)  # once in each fit()
    for make, built in ((adam, True), (legacy_adam, False)):
        assert said(hvd.DistributedOptimizer(make()), both, built) == []
        texts = said(hvd.DistributedOptimizer(make()), [metric], built)
        assert len(texts) == expected, texts
        assert all("between rank 0 and rank 1" in text for text in texts)
        texts = said(make(), both, built)
        assert len(texts) == expected, texts
        assert all("its optimizer, Adam, is not distributed" in text for text in texts)


def scenario_ranks_stop_together() -> None:
    inputs, targets = (mine(part) for part in data(12 * hvd.size()))
    last = hvd.rank() == hvd.size() - 1
    metric = hvd.callbacks.MetricAverageCallback
    for make in (sgd, legacy_sgd):
        model = dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse")
        early = k2.callbacks.EarlyStopping("loss", patience=1 + hvd.rank(), min_delta=1e9)
        callbacks = [metric()] if hvd.rank() else [metric(), early]
        how = {"batch_size": 4, "epochs": 5, "shuffle": False, "verbose": 0}
        assert len(model.fit(inputs, targets, callbacks=callbacks, **how).history["loss"]) == 2
        bad = np.where(last & (np.arange(12) == 5), np.nan, 1)[:, None] * inputs
        batches: list[int] = []

        def note(batch: int, logs: Any, seen: list[int] = batches) -> None:
            seen.append(batch)

        count = k2.callbacks.LambdaCallback(on_batch_end=note)
        callbacks = [metric(), count, *([k2.callbacks.TerminateOnNaN()] if last else [])]
        model.fit(bad, targets, callbacks=callbacks, **how)
        assert len(batches) == 2


def scenario_all_ranks_save_after_the_same_batch_and_end() -> None:
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    inputs, targets = (mine(part) for part in data(12 * hvd.size()))

    def call(begin: Any, callback: Any) -> None:
        first = k2.callbacks.LambdaCallback(on_train_batch_begin=begin)
        model.fit(inputs, targets, batch_size=4, epochs=2, callbacks=[first, callback], verbose=0)

    stop_in_fit(call, lambda: weights_of(model))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tf_keras_model = make_tests(body, sizes(2), env=environment("tensorflow"))


def other_backend() -> list[str]:
    """Keras 3 computes with PyTorch in the same process; Keras 2 does not use it."""
    start()
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
    ]
    inputs, targets = (mine(part) for part in data(8 * hvd.size()))
    model.fit(inputs, targets, batch_size=4, callbacks=callbacks, verbose=0)
    assert same_bits(weights_of(model))
    with pytest.raises(hvd.ArgumentError) as error:
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    return [keras.backend.backend(), str(error.value)]


def test_beside_another_backend_of_keras_3() -> None:
    preload = ("keras", "tensorflow")
    for result in run_world(2, other_backend, env=environment("torch"), preload=preload):
        backend, message = result.value
        assert backend == "torch" and "needs KERAS_BACKEND=tensorflow" in message
