"""The checks and the warnings of the callbacks for a call of fit()."""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import tempfile
import warnings
from typing import Any

import numpy as np
import pytest

from parallel.keras.callback_fits import Probe, compiled, fit
from parallel.keras.keras_worlds import (
    BACKENDS,
    KERAS_2,
    adam,
    and_legacy,
    array_of,
    data,
    dense_model,
    hvd,
    keras,
    on_backends,
    on_keras_2,
    run_scenarios,
)
from parallel.scenarios import make_tests

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")


def scenario_uneven_batches_are_an_error_on_every_rank() -> None:
    for callback in (
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ):
        model = compiled(keras.optimizers.SGD(0.1), alike=True)
        inputs, targets = data(12 + 4 * hvd.rank())
        with pytest.raises(hvd.ArgumentError) as error:
            model.fit(inputs, targets, batch_size=4, callbacks=[callback], verbose=0)
        assert "3 on rank 0, 4 on rank 1" in str(error.value)
        assert "steps_per_epoch=3" in str(error.value)
        with pytest.raises(hvd.ArgumentError, match="1 on rank 0, 2 on rank 1"):
            model.fit(
                inputs, targets, epochs=1 + hvd.rank(), steps_per_epoch=1, callbacks=[callback],
                verbose=0,
            )  # fmt: skip
        model.fit(inputs, targets, steps_per_epoch=1, callbacks=[callback], verbose=0)


def said_by(call: Any) -> list[str]:
    """Collect this rank's warnings about models that differ during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    kind = hvd.ReplicasDifferWarning
    return [str(one.message) for one in caught if one.category is kind]


def expect_once(texts: list[str], *parts: str) -> None:
    """Check that rank 0 has warned, once."""
    assert len(texts) == (hvd.rank() == 0), texts
    assert all(part in text for text in texts for part in parts), texts


def both_callbacks() -> list[Any]:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return [hvd.callbacks.MetricAverageCallback(), broadcast]


def scenario_forgotten_broadcast_is_warned_of_in_each_fit() -> None:
    model = compiled(keras.optimizers.SGD(0.01))
    first = model.trainable_variables[0]
    name = getattr(first, "path", first.name)
    for _ in range(2):
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        expect_once(
            said_by(lambda c=callbacks: fit(model, c)),  # type: ignore[misc]
            f"fit(): 4 of 4 parameters differ between rank 0 and rank 1, first '{name}'",
            "add hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
        )
    assert said_by(lambda: fit(model, both_callbacks()[::-1])) == []
    assert said_by(lambda: fit(model, [hvd.callbacks.MetricAverageCallback()])) == []


def scenario_forgotten_broadcast_to_a_model_that_the_first_batch_builds() -> None:
    metric = hvd.callbacks.MetricAverageCallback
    cases = itertools.product(
        ([metric()], [metric(), metric()], both_callbacks()), and_legacy(adam)
    )
    for callbacks, make in cases:
        model = compiled(make(), built=False, run_eagerly=True)
        texts = said_by(lambda m=model, c=callbacks: fit(m, c))  # type: ignore[misc]
        if isinstance(callbacks[-1], metric):
            expect_once(texts, "2 of 4 parameters differ")  # Biases begin at zero.
        else:
            assert texts == []


def scenario_forgotten_optimizer_is_warned_of() -> None:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
    for callbacks in ([hvd.callbacks.MetricAverageCallback()], [broadcast(0)], both_callbacks()):
        model = dense_model()
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
        expect_once(
            said_by(lambda m=model, c=callbacks: fit(m, c)),  # type: ignore[misc]
            "its optimizer, SGD, is not distributed",
            "optimizer=hvd.DistributedOptimizer(SGD(...))",
        )


def scenario_a_train_step_of_ones_own_may_reduce_by_itself() -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, *args: Any, **how: Any) -> Any:
            return super().train_step(*args, **how)

    model = Own([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    assert said_by(lambda: fit(model, both_callbacks())) == []


def scenario_local_variables_may_differ() -> None:
    model = compiled(keras.optimizers.SGD(0.01), alike=True)
    expert = model.layers[-1]
    for variable in expert.trainable_variables:
        variable.assign(array_of(variable) + hvd.rank())
        model.optimizer.register_local_var(variable)
    assert said_by(lambda: fit(model, [hvd.callbacks.MetricAverageCallback()])) == []


def stopping(hook: str, when: int) -> Any:
    """Make a callback that stops `fit` in this call of its hook, on the last rank alone."""
    calls: list[int] = []

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def stop(self, *_: Any, **__: Any) -> None:
            calls.append(0)
            self.model.stop_training |= len(calls) == when and hvd.rank() == hvd.size() - 1

    setattr(Stops, hook, Stops.stop)
    return Stops()


def scenario_ranks_stop_together() -> None:
    stops = (
        ("on_epoch_end", 2, 6),
        ("on_train_batch_end", 4, 4),
        ("on_train_batch_begin", 2, 2),
        ("on_batch_end", 5, 5),
    )
    last = hvd.size() - 1
    # Either callback is enough for a hook.
    for (hook, when, batches), ours in zip(stops, both_callbacks() * 2, strict=True):
        model = compiled(keras.optimizers.SGD(0.01))
        callbacks = [ours] if hvd.rank() < last else [ours, stopping(hook, when)]
        seen = Probe("on_train_batch_end", lambda: 0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            said_by(lambda c=[*callbacks, seen.callback], m=model: fit(m, c, epochs=4))  # type: ignore[misc]
        assert len(seen.seen) == batches, (hook, ours, seen.seen)
        expected = f"because rank {last} set model.stop_training"
        assert (expected in said.getvalue()) == (hvd.rank() == 0), said.getvalue()


def scenario_early_stopping_of_each_ranks_own_metrics() -> None:
    """Whatever the order of the callbacks is, the ranks stop after the same epoch."""
    model = compiled(keras.optimizers.SGD(0.0), alike=True)
    stop = keras.callbacks.EarlyStopping("loss", patience=1 + hvd.rank(), min_delta=1e9)
    average = hvd.callbacks.MetricAverageCallback()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        history = fit(model, [stop, average], epochs=9)
    assert len(history["loss"]) == 2
    expected = "after epoch 1, because rank 0 set model.stop_training"
    assert (expected in said.getvalue()) == (hvd.rank() == 0)


def scenario_nan_on_one_rank_ends_fit_after_the_same_batch() -> None:
    for nan_check in (True, hvd.rank() == hvd.size() - 1):
        model = compiled(keras.optimizers.SGD(0.01), alike=True)
        inputs, targets = data(24)
        if hvd.rank() == hvd.size() - 1:
            inputs[9] = np.nan
        seen = Probe("on_train_batch_end", lambda: 0)
        callbacks = [*both_callbacks(), seen.callback]
        callbacks += [keras.callbacks.TerminateOnNaN()] if nan_check else []
        model.fit(inputs, targets, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        assert len(seen.seen) == 3


def scenario_first_epochs_that_differ_are_an_error() -> None:
    """As with BackupAndRestore, if only one rank has a backup."""
    for ours in both_callbacks():
        model = compiled(keras.optimizers.SGD(0.01), alike=True)
        with pytest.raises(hvd.ArgumentError, match="epoch 0 on rank 0, 2 on rank 1"):
            fit(model, [ours], epochs=4, initial_epoch=2 * hvd.rank())


def scenario_a_backup_of_each_rank_goes_on_alike() -> None:
    if on_keras_2():
        return
    (folder,) = hvd.broadcast_object([tempfile.mkdtemp()], root_rank=0)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/{hvd.rank()}", delete_checkpoint=False)

    class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)
            if epoch == last:
                raise KeyboardInterrupt

    weights = []
    for last, expected in ((2, [0, 1, 2]), (None, [2, 3])):  # noqa: B007
        epochs: list[int] = []
        model = compiled(keras.optimizers.Adam(0.01), alike=True)
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, [*both_callbacks(), backup, Epochs()], epochs=4)
        assert epochs == expected
        weights.append([array_of(one) for one in model.weights])
    whole = compiled(keras.optimizers.Adam(0.01), alike=True)
    fit(whole, both_callbacks(), epochs=4)
    for ours, theirs in zip(weights[-1], whole.weights, strict=True):
        np.testing.assert_allclose(ours, array_of(theirs), rtol=1e-5)
    hvd.broadcast_object([], root_rank=0)  # All have read their backup.
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_fit_checks = make_tests(body, on_backends(*((2, b) for b in (*BACKENDS, KERAS_2))))
