"""The callbacks: initial weights, averaged metrics, learning rates."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from parallel.keras.callback_fits import Probe, compiled, fit, in_test, stop_in_fit
from parallel.keras.keras_worlds import (
    BACKENDS,
    KERAS_2,
    adam,
    and_legacy,
    array_of,
    data,
    dense_model,
    environment,
    hvd,
    keras,
    on_backends,
    on_every_rank,
    on_keras_2,
    run_scenarios,
    same_bits,
    sgd,
    start,
    weights_of,
)
from parallel.scenarios import make_tests, raises

PRELOAD = ("keras", "tensorflow")


def scenario_broadcast_before_the_first_batch() -> None:
    # In Keras 2 the learning rate is not a variable of the optimizer.
    rate = 0.01 if on_keras_2() else 0.01 * (1 + hvd.rank())
    model = compiled(keras.optimizers.Adam(rate))
    root = hvd.size() - 1
    probe = Probe("on_train_batch_begin", lambda: same_bits(weights_of(model)))
    expected = hvd.broadcast_object(weights_of(model), root)
    before = []
    first = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: before or before.extend(weights_of(model))
    )
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(root), probe.callback, first])
    assert all(np.array_equal(a, b) for a, b in zip(before, expected, strict=True))
    assert probe.seen == [True] * 6
    assert on_keras_2() or np.isclose(float(model.optimizer.learning_rate), 0.01 * hvd.size())


def scenario_broadcast_after_the_first_batch() -> None:
    """Layers that cannot be built without data are built by the first batch."""
    for make in and_legacy(adam):
        model = compiled(make(), built=False, run_eagerly=True)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1)
        probe = Probe("on_train_batch_end", lambda m=model: same_bits(weights_of(m)))
        fit(model, [callback, probe.callback])
        assert callback.broadcast_done
        assert probe.seen == [True] * 6


def scenario_broadcast_when_only_one_rank_has_built() -> None:
    model = compiled(keras.optimizers.SGD(0.01), built=hvd.rank() == 0)
    probe = Probe("on_train_batch_end", lambda: same_bits(weights_of(model)))
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), probe.callback])
    assert probe.seen == [True] * 6


def scenario_local_variables_are_not_broadcast() -> None:
    model = compiled(keras.optimizers.SGD(0.0))
    own = model.layers[0].weights
    before = [array_of(one) for one in own]
    root = hvd.size() - 1
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(root, local_variables=own)
    for one in own:
        model.optimizer.register_local_var(one)
    fit(model, [broadcast], epochs=1)
    assert all(np.array_equal(array_of(one), old) for one, old in zip(own, before, strict=True))
    assert same_bits([array_of(one) for one in model.layers[1].weights])


def scenario_broadcast_of_a_loaded_model() -> None:
    """Rank 0 resumes from a file; the others begin anew, and get its state."""
    if on_keras_2():
        return
    model = compiled(keras.optimizers.Adam(0.01))
    if hvd.rank() == 0:
        alone = keras.models.clone_model(model)
        alone.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        alone.fit(*data(8), batch_size=4, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            alone.save(Path(folder) / "model.keras")
            model = hvd.load_model(Path(folder) / "model.keras")
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1)
    assert int(model.optimizer.iterations) == 2 + 3
    assert same_bits([array_of(variable) for variable in model.optimizer.variables])


def scenario_seeds_stay_each_ranks_own() -> None:
    if on_keras_2():
        return
    keras.utils.set_random_seed(hvd.rank())
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((64,)), dropout, keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss="mse")
    ones = np.ones((4, 64), "float32")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(ones, ones[:, :1], callbacks=[callback], verbose=0)
    masks = on_every_rank(array_of(dropout(ones, training=True)).tobytes())
    assert len(set(masks)) == hvd.size()
    assert same_bits(weights_of(model))


def scenario_metrics_count_samples() -> None:
    """Ranks with a smaller last batch count less, in training and in validation."""
    rank, size = hvd.rank(), hvd.size()
    metrics = ["mae", keras.metrics.AUC(name="auc")]
    model = compiled(keras.optimizers.SGD(0.0), alike=True, metrics=metrics)
    inputs = np.random.default_rng(1).normal(size=(5 * size + size, 5)).astype("float32")
    targets = (inputs[:, :1] > 0).astype("float32")
    expected = model.evaluate(inputs, targets, verbose=0, return_dict=True)
    ends = np.cumsum([0, *(5 + (r % 2) for r in range(size - 1))]).tolist() + [len(inputs)]
    share = slice(ends[rank], ends[rank + 1])
    other = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    seen: list[Any] = []
    history = model.fit(
        inputs[share], targets[share], validation_data=(inputs[share], targets[share]),
        batch_size=7, epochs=2, verbose=0, steps_per_epoch=1, validation_steps=1,
        callbacks=[hvd.callbacks.MetricAverageCallback(), other],
    ).history  # fmt: skip
    for key in ("loss", "mae"):
        assert np.allclose(history[key], expected[key], rtol=1e-5), key
        assert np.allclose(history[f"val_{key}"], expected[key], rtol=1e-5), key
    assert [logs["val_loss"] for logs in seen] == history["val_loss"]
    assert len(set(map(repr, on_every_rank(history)))) == 1


def uneven_shares(samples: int) -> slice:
    """Return rank r's part of the samples; all parts have different sizes."""
    ends = np.cumsum([0, *range(2, hvd.size() + 1)]).tolist() + [samples]
    return slice(ends[hvd.rank()], ends[hvd.rank() + 1])


def scenario_evaluate_averages_as_fit_does() -> None:
    model = compiled(keras.optimizers.SGD(0.0), alike=True, metrics=["mae"])
    inputs, targets = data(20)
    expected = model.evaluate(inputs, targets, verbose=0, return_dict=True)
    share = uneven_shares(20)
    seen: list[Any] = []
    other = in_test(on_end=lambda logs: seen.append(dict(logs)))
    average = hvd.callbacks.MetricAverageCallback()
    how: dict[str, Any] = {"batch_size": 4, "verbose": 0}
    own = model.evaluate(inputs[share], targets[share], return_dict=True, **how)
    how["callbacks"] = [average, other]
    found = model.evaluate(inputs[share], targets[share], return_dict=True, **how)
    assert found == pytest.approx(expected, rel=1e-5) and seen == [found]
    assert own != pytest.approx(expected, rel=1e-3)
    assert model.evaluate(inputs[share], targets[share], **how) == list(found.values())
    # The model is unchanged, also after an evaluate() that raised.
    with pytest.raises(ZeroDivisionError):
        fail = in_test(on_batch=lambda: 1 // 0)
        model.evaluate(inputs[share], targets[share], verbose=0, callbacks=[average, fail])
    fit(model, [average], epochs=1)
    assert "get_metrics_result" not in vars(model)
    again = model.evaluate(inputs[share], targets[share], batch_size=4, verbose=0, return_dict=True)
    assert again == own


def two_outputs() -> Any:
    """Make a model whose metrics have one name, of two outputs, with and without weights."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("one", "two")}
    model = keras.Model(inputs, outputs)
    metrics = {name: ["mae", "mae"] for name in outputs}
    model.compile(
        keras.optimizers.SGD(0.0),
        loss=dict.fromkeys(outputs, "mse"),
        metrics=metrics,
        weighted_metrics=metrics,
    )
    return model


def scenario_metrics_with_one_name() -> None:
    if on_keras_2():
        return
    inputs, targets = data(24)
    both = dict.fromkeys(("one", "two"), targets)
    # One rank's samples weigh most, in another way for each output.
    first = np.arange(24) % hvd.size() == 0
    weights = {"one": np.where(first, 10.0, 0.1), "two": np.where(first, 0.5, 7.0)}
    how: dict[str, Any] = {"batch_size": 24, "verbose": 0, "return_dict": True}
    expected: Any = None
    if hvd.rank() == 0:
        expected = two_outputs().evaluate(inputs, both, sample_weight=weights, **how)
    expected = hvd.broadcast_object(expected, 0)
    mine = slice(hvd.rank(), None, hvd.size())
    found = two_outputs().evaluate(
        inputs[mine],
        {name: one[mine] for name, one in both.items()},
        sample_weight={name: one[mine] for name, one in weights.items()},
        callbacks=[hvd.callbacks.MetricAverageCallback()],
        **how,
    )
    assert len([name for name in expected if "mae" in name]) == 8
    assert found == pytest.approx(expected, rel=1e-4)


def with_moments(frozen: bool) -> Any:
    """Make a model whose moving statistics differ between ranks, and whose kernel is frozen."""
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )
    model.layers[0].trainable = not frozen
    model.add(keras.layers.Dense(1))
    moments = model.layers[1].non_trainable_weights
    for variable in moments:
        variable.assign(array_of(variable) + np.float32(hvd.rank()))
    return model


def scenario_allreduce_buffers() -> None:
    model = with_moments(frozen=True)
    hvd.broadcast_variables(model.layers[0].weights)
    kernel = array_of(model.layers[0].kernel)
    mean = (hvd.size() - 1) / 2
    hvd.allreduce_buffers(model)
    moving_mean, moving_variance = map(array_of, model.layers[1].non_trainable_weights)
    assert np.allclose(moving_mean, mean) and np.allclose(moving_variance, 1 + mean)
    assert np.array_equal(array_of(model.layers[0].kernel), kernel)
    with pytest.raises(hvd.ArgumentError, match="takes a model, not a list"):
        hvd.allreduce_buffers(model.weights)
    hvd.allreduce_buffers(dense_model())  # nothing to average


def check_moments_in_fit(**how: Any) -> list[bool]:
    """Record after each validation whether all ranks' weights were the same; check each epoch."""
    model = with_moments(frozen=False)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    probe = Probe("on_epoch_end", lambda: same_bits(weights_of(model)))
    alike: list[bool] = []
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(average_buffers=True),
        probe.callback,
        in_test(on_end=lambda _: alike.append(same_bits(weights_of(model)))),
    ]
    fit(model, callbacks, **how)
    assert probe.seen == [True, True]
    return alike


def scenario_buffers_are_averaged_before_validation() -> None:
    assert check_moments_in_fit(validation_data=data(4)) == [True, True]
    assert check_moments_in_fit() == []


def scenario_metrics_that_one_rank_lacks() -> None:
    """Validation on rank 0 alone: all ranks get an error."""
    model = compiled(keras.optimizers.SGD(0.0), alike=True)
    inputs, targets = data(4)
    validation = (inputs, targets) if hvd.rank() == 0 else None
    stop = keras.callbacks.EarlyStopping("val_loss", patience=0)
    callbacks = [hvd.callbacks.MetricAverageCallback(), stop]
    history = fit(model, callbacks, epochs=3, validation_data=validation)
    assert len(history["val_loss"]) == 2, history
    assert len(set(on_every_rank(history["val_loss"][0]))) == 1


def rates_in(model: Any, callbacks: list[Any], **how: Any) -> list[float]:
    probe = Probe("on_train_batch_end", lambda: float(array_of(model.optimizer.learning_rate)))
    fit(model, [*callbacks, probe.callback], **how)
    return probe.seen


def scenario_warmup() -> None:
    size = hvd.size()
    for make in (*and_legacy(sgd), *and_legacy(adam)):
        model = compiled(make())
        callback = hvd.callbacks.LearningRateWarmupCallback(0.6, warmup_epochs=2)
        rates = rates_in(model, [callback], epochs=3)
        steps = [0.6 / size * (1 + (i + 1) / 6 * (size - 1)) for i in range(6)]
        assert np.allclose(rates, [*steps, 0.6, 0.6, 0.6])


def scenario_warmup_of_a_schedule() -> None:
    if on_keras_2():
        return
    size = hvd.size()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.6, 1, 0.9)
    plain = type(schedule)
    model = compiled(keras.optimizers.SGD(schedule, momentum=0.9))
    how: dict[str, Any] = {"epochs": 2, "samples": 8}
    rates = rates_in(model, [], **how)  # traced before the callback runs
    assert np.allclose(rates, [0.6 * 0.9 ** (i + 1) for i in range(4)])
    before = weights_of(model)
    callback = hvd.callbacks.LearningRateScheduleCallback(None, 0.0, end_epoch=1)
    fit(model, [callback], epochs=1, samples=8)
    # With a rate of zero the velocity is scaled to zero, too, and no weight changes.
    assert all(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
    warmup = hvd.callbacks.LearningRateWarmupCallback(None, warmup_epochs=2)
    rates = rates_in(model, [warmup], **how)
    factors = [(1 + (i + 1) / 4 * (size - 1)) / size for i in range(4)]
    assert np.allclose(rates, [0.6 * 0.9 ** (7 + i) * f for i, f in enumerate(factors)])
    config = keras.optimizers.serialize(model.optimizer)["config"]["learning_rate"]
    assert config["class_name"] == "ExponentialDecay" and schedule.__class__ is plain
    copy = keras.optimizers.schedules.deserialize(config)
    assert type(copy) is plain and np.isclose(float(array_of(copy(0))), 0.6)


def scenario_schedule() -> None:
    model = compiled(keras.optimizers.SGD(0.5))
    callbacks = [
        hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.1**epoch, end_epoch=2),
        hvd.callbacks.LearningRateScheduleCallback(0.5, 0.25, start_epoch=2),
    ]
    probe = Probe("on_train_batch_end", lambda: float(array_of(model.optimizer.learning_rate)))
    history = fit(model, [*callbacks, probe.callback], epochs=3, samples=8)
    assert np.allclose(probe.seen, [0.5, 0.5, 0.05, 0.05, 0.125, 0.125])
    assert np.allclose(history["learning_rate"], [0.5, 0.05, 0.125])


def scenario_momentum_correction() -> None:
    """Velocities hold gradients times the old rate; with correction they change with the rate."""
    for make in and_legacy(sgd):
        model = compiled(make(), alike=True, run_eagerly=True)
        optimizer, first = model.optimizer, model.trainable_variables[0]
        fit(model, [], epochs=1, samples=4)
        old = hasattr(optimizer, "get_slot")
        velocity = optimizer.get_slot(first, "momentum") if old else optimizer.momentums[0]
        for correct, expected in ((True, 0.2), (False, 2.0)):
            velocity.assign(np.full((5, 4), 2.0, "float32"))
            optimizer.learning_rate = 1.0
            callback = hvd.callbacks.LearningRateScheduleCallback(
                1.0, 0.1, momentum_correction=correct
            )
            callback.set_model(model)
            callback.on_epoch_begin(0)
            callback.on_train_batch_begin(0)
            assert np.allclose(array_of(velocity), expected)


def scenario_warmup_of_a_model_that_the_first_batch_builds() -> None:
    for make in (*and_legacy(sgd), *(and_legacy(adam) if on_keras_2() else [])):
        model = compiled(make(), built=False)
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1)
        history = fit(model, [warmup], epochs=1)
        assert np.isclose(history["learning_rate"], 0.05)


def scenario_schedules_are_refused_in_keras_2() -> None:
    for family in (keras.optimizers, keras.optimizers.legacy) if on_keras_2() else ():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        model = compiled(family.SGD(schedule))
        with raises(hvd.ArgumentError, "give the optimizer a number"):
            fit(model, [hvd.callbacks.LearningRateWarmupCallback(None)])


def scenario_learning_rates_that_cannot_change() -> None:
    with raises(hvd.ArgumentError, "initial_lr"):
        fit(compiled(sgd()), [hvd.callbacks.LearningRateWarmupCallback(None)])
    if not on_keras_2():
        with raises(hvd.ArgumentError, "neither a number"):
            model = compiled(keras.optimizers.SGD(lambda: 0.1))
            fit(model, [hvd.callbacks.LearningRateWarmupCallback(0.1)])

    def endless() -> Any:
        while True:
            yield tuple(part[:4] for part in data())

    with pytest.raises(hvd.ArgumentError, match="steps_per_epoch"):
        compiled(keras.optimizers.SGD(0.1)).fit(
            endless(),
            verbose=0,
            shuffle=False,
            callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)],
        )
    rates = rates_in(
        compiled(keras.optimizers.SGD(0.1)),
        [hvd.callbacks.LearningRateWarmupCallback(0.1, 1, steps_per_epoch=3, verbose=1)],
        epochs=1,
    )
    assert np.isclose(rates[-1], 0.1)


def scenario_best_model_on_rank_0() -> None:
    model = compiled(keras.optimizers.SGD(0.01))
    inputs, targets = data(4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "best.keras"
        callbacks = [
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.BestModelCheckpoint(path),
        ]
        fit(model, callbacks, validation_data=(inputs, targets))
        assert path.exists() == (hvd.rank() == 0)
        if hvd.rank() == 0:
            saved = keras.models.load_model(path)
            assert len(saved.weights) == len(model.weights)


def scenario_all_ranks_save_after_the_same_batch_and_end() -> None:
    model = compiled(keras.optimizers.SGD(0.01), alike=True)

    def call(begin: Any, callback: Any) -> None:
        first = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
        fit(model, [first, hvd.callbacks.MetricAverageCallback(), callback])

    stop_in_fit(call, lambda: weights_of(model))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_callbacks = make_tests(
    body,
    on_backends(*((2, b) for b in (*BACKENDS, KERAS_2))),
    quick=("2-torch",),
)


def keras_2_beside_pytorch() -> str:
    """Keras 3 computes with PyTorch in the same process; Keras 2 does not use it."""
    start()
    model = compiled(sgd(), alike=True)
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
    ]
    fit(model, callbacks)
    assert same_bits(weights_of(model))
    with pytest.raises(hvd.ArgumentError) as error:
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    return str(error.value)


@pytest.mark.long
def test_keras_2_beside_another_backend_of_keras_3() -> None:
    env = {**environment(KERAS_2), "KERAS_BACKEND": "torch"}
    for result in run_world(2, keras_2_beside_pytorch, env=env):
        assert "needs KERAS_BACKEND=tensorflow" in result.value
