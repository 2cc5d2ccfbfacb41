"""DistributedOptimizer of Keras: loss scaling, accumulation, wrapping, saving and loading."""

from __future__ import annotations

import importlib
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from parallel.keras.keras_worlds import (
    BACKENDS,
    data,
    dense_model,
    environment,
    hvd,
    keras,
    mine,
    on_backends,
    on_every_rank,
    on_tensorflow,
    run_scenarios,
    same_bits,
    weights_of,
)
from parallel.scenarios import make_tests, tensors_sent_by

PRELOAD = ("keras", "tensorflow")


def array(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)


def close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(np.allclose(array(a), array(b), atol=tolerance) for a, b in pairs)


@contextmanager
def mixed_precision() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Return a new folder, the same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(hvd.broadcast_object(own))
        hvd.allgather_object("all are done with it")


def fit_with_a_bad_batch(optimizer: Any, **how: Any) -> None:
    """One rank's third batch of four is infinite: all ranks skip that step, and only that."""
    with mixed_precision():
        model = dense_model(dtype="mixed_float16")
    model.compile(optimizer=optimizer, loss="mse", **how)
    scaler = model.optimizer
    assert type(scaler).__name__ == "LossScaleOptimizer"
    scaler.initial_scale = 2.0**10  # no overflow except this one
    inputs, targets = data(16 * hvd.size())
    inputs, targets = mine(inputs).copy(), mine(targets)
    if hvd.rank() == 0:
        inputs[8] = np.inf
    count = tensors_sent_by(
        lambda: model.fit(inputs, targets, batch_size=4, epochs=1, shuffle=False, verbose=0)
    )
    assert count == 4 * len(model.trainable_variables)
    assert int(scaler.inner_optimizer.iterations) == 3
    assert float(array(scaler.dynamic_scale)) == 2.0**9
    assert all(np.isfinite(weight).all() for weight in weights_of(model))
    assert same_bits(weights_of(model))


def scenario_imports_no_other_framework() -> None:
    assert "hvdlite.keras" in sys.modules
    hvd.DistributedOptimizer(keras.optimizers.SGD())
    if on_tensorflow():
        importlib.import_module("hvdlite.tensorflow")
        assert not {"torch", "tf_keras"} & sys.modules.keys()
    else:
        assert "hvdlite.tensorflow" not in sys.modules


def scenario_rows_that_travel_are_those_of_one_process() -> None:
    """The same rows are on several ranks, several times."""
    words = np.random.default_rng(1).integers(1, 60, (16 * hvd.size(), 6)) * 50
    wanted = (words.sum(1) > 8800).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def make() -> Any:
        keras.utils.set_random_seed(0)
        table = keras.layers.Embedding(3000, 8)
        return keras.Sequential(
            [keras.Input((6,)), table, keras.layers.Flatten(), keras.layers.Dense(2)]
        )

    for kind in (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.RMSprop):
        model = make()
        model.compile(hvd.DistributedOptimizer(kind(0.01)), loss)
        how: dict[str, Any] = {"epochs": 1, "shuffle": False, "verbose": 0}
        model.fit(mine(words), mine(wanted), batch_size=8, **how)
        assert same_bits(weights_of(model))
        if hvd.rank() > 0:
            continue
        twin, optimizer = make(), kind(0.01)
        for batch in np.split(np.arange(len(words)), 2):
            step_densely(twin, optimizer, loss, words[batch], wanted[batch])
        assert close(model.trainable_variables, twin.trainable_variables, 1e-5), kind


def step_densely(model: Any, optimizer: Any, loss: Any, inputs: Any, wanted: Any) -> None:
    """Step with dense gradients, since Keras squares each row of a sparse one by itself."""
    if not on_tensorflow():
        model.compile(optimizer, loss)
        model.train_on_batch(inputs, wanted)
        return
    tf = importlib.import_module("tensorflow")
    with tf.GradientTape() as tape:
        value = loss(wanted, model(inputs, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply([tf.convert_to_tensor(one) for one in gradients], model.trainable_variables)


def scenario_loss_scaling_that_compile_adds() -> None:
    fit_with_a_bad_batch(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))


def scenario_loss_scaling_that_compile_adds_eagerly() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    fit_with_a_bad_batch(optimizer, run_eagerly=True)


def scenario_loss_scaling_inside() -> None:
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    fit_with_a_bad_batch(hvd.DistributedOptimizer(scaler))


def scenario_loss_scaling_outside() -> None:
    inner = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    fit_with_a_bad_batch(keras.optimizers.LossScaleOptimizer(inner))


def scenario_loss_scaling_without_us_stays_as_it_is() -> None:
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    variable = keras.Variable(np.ones(2, "float32"))
    assert tensors_sent_by(lambda: scaler.apply([keras.ops.ones(2)], [variable])) == 0


def scenario_static_loss_scale_sees_averages() -> None:
    optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=4.0)
    variable = keras.Variable(np.zeros(2, "float32"))
    gradient = keras.ops.full((2,), 4.0 * (hvd.rank() + 1))
    hvd.DistributedOptimizer(optimizer).apply([gradient], [variable])
    assert np.allclose(array(variable), -(hvd.size() + 1) / 2)


def fit_in_passes(passes: int, average: bool, make: Any, **how: Any) -> None:
    """Batches of 4 in `passes` passes equal one process with batches of 4 * passes."""
    model = dense_model()
    optimizer = hvd.DistributedOptimizer(
        make(), backward_passes_per_step=passes, average_aggregated_gradients=average
    )
    samples = 4 * passes * hvd.size()
    inputs, targets = data(samples * 3)
    model.compile(optimizer=optimizer, loss="mse", **how)
    count = tensors_sent_by(
        lambda: model.fit(
            mine(inputs), mine(targets), batch_size=4, epochs=2, shuffle=False, verbose=0
        )
    )
    assert count == 3 * 2 * len(model.trainable_variables)
    assert int(optimizer.iterations) == 6
    assert same_bits(weights_of(model))
    if hvd.rank() == 0:
        alone = dense_model()
        # A mean over the batches of a step, or their sum.
        alone.compile(optimizer=make(), loss="mse", loss_weights=None if average else float(passes))
        alone.fit(inputs, targets, batch_size=samples, epochs=2, shuffle=False, verbose=0)
        assert len(optimizer.variables) == len(alone.optimizer.variables)
        assert close(model.weights, alone.weights)


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def scenario_passes_are_summed() -> None:
    fit_in_passes(2, False, sgd)


def scenario_passes_are_averaged() -> None:
    fit_in_passes(3, True, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))


def scenario_passes_eagerly() -> None:
    fit_in_passes(2, True, sgd, run_eagerly=True)


def scenario_passes_of_several_steps_at_once() -> None:
    if on_tensorflow():
        fit_in_passes(2, True, sgd, steps_per_execution=3)


def scenario_passes_with_loss_scaling() -> None:
    with mixed_precision():
        model = dense_model(dtype="mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(optimizer=optimizer, loss="mse")
    model.optimizer.initial_scale = 2.0**10
    inputs, targets = data(16 * hvd.size())
    inputs = mine(inputs).copy()
    if hvd.rank() == hvd.size() - 1:
        inputs[0] = np.inf  # in the first of two steps
    model.fit(inputs, mine(targets), batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.inner_optimizer.iterations) == 1
    assert same_bits(weights_of(model))


def scenario_passes_of_an_embedding() -> None:
    keras.utils.set_random_seed(11)
    model = keras.Sequential([keras.layers.Embedding(6, 2), keras.layers.Flatten()])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), backward_passes_per_step=2)
    model.compile(optimizer=optimizer, loss="mse")
    tokens = np.full((8, 1), hvd.rank())
    model.fit(tokens, np.ones((8, 2)), batch_size=4, verbose=0)
    assert int(optimizer.iterations) == 1
    assert same_bits(weights_of(model))


def scenario_keeps_its_class_and_state() -> None:
    inner = keras.optimizers.Adam(0.01, clipnorm=1.0, name="mine")
    plain = type(inner)
    inner.exclude_from_weight_decay(var_names=["bias"])
    variables = dense_model().trainable_variables
    inner.apply([keras.ops.ones(variable.shape) for variable in variables], variables)
    before = [array(variable) for variable in inner.variables]
    config = keras.optimizers.serialize(inner)
    optimizer = hvd.DistributedOptimizer(inner)
    assert optimizer is inner and isinstance(optimizer, keras.optimizers.Adam)
    assert optimizer.__class__ is plain and type(optimizer).__name__ == "Adam"
    assert keras.optimizers.serialize(optimizer) == config
    assert int(optimizer.iterations) == 1
    assert all(
        np.array_equal(a, array(b)) for a, b in zip(before, optimizer.variables, strict=True)
    )
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(copy) is plain
    assert (
        type(pickle.loads(pickle.dumps(hvd.DistributedOptimizer(keras.optimizers.Adam())))) is plain
    )


def scenario_gradients_of_the_caller_stay_as_they_are() -> None:
    """Also those that one tensor is for several variables."""
    ranks = range(1, hvd.size() + 1)
    for op, total in ((hvd.Sum, sum(ranks)), (hvd.Average, sum(ranks) / hvd.size())):
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            pair = [keras.Variable(np.zeros(4, "float32")) for _ in range(2)]
            sgd = keras.optimizers.SGD(1.0)
            optimizer = hvd.DistributedOptimizer(sgd, op=op, compression=compression)
            gradient = keras.ops.convert_to_tensor(np.full(4, hvd.rank() + 1, "float32"))
            optimizer.apply([gradient, gradient], pair)
            for variable in pair:
                assert np.allclose(keras.ops.convert_to_numpy(variable), -total)
            assert np.all(keras.ops.convert_to_numpy(gradient) == hvd.rank() + 1)


def scenario_strategies_are_refused() -> None:
    if not on_tensorflow():
        return
    import tensorflow as tf

    refused = pytest.raises(hvd.ArgumentError, match="scope of a MirroredStrategy.*-np N")
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope(), refused:
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def scenario_wraps_once() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(hvd.ArgumentError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(hvd.ArgumentError, match="already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))


def scenario_misuse_says_what_to_do() -> None:
    for optimizer, arguments, text in (
        ("adam", {}, "keras.optimizers.Adam"),
        (keras.optimizers.SGD(), {"op": hvd.Max}, "op=hvd.Max makes no gradient"),
        (keras.optimizers.SGD(), {"gradient_predivide_factor": 0.0}, "positive"),
        (
            keras.optimizers.SGD(),
            {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            "cannot be combined with op=hvd.Sum",
        ),
        (keras.optimizers.SGD(), {"backward_passes_per_step": 0}, "at least 1"),
        (
            keras.optimizers.SGD(gradient_accumulation_steps=4),
            {},
            "backward_passes_per_step=4, average_aggregated_gradients=True",
        ),
        (
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(gradient_accumulation_steps=3)
            ),
            {},
            "backward_passes_per_step=3",
        ),
    ):
        with pytest.raises(hvd.ArgumentError, match=text):
            hvd.DistributedOptimizer(optimizer, **arguments)
    stray = type(hvd.DistributedOptimizer(keras.optimizers.SGD()))()
    with pytest.raises(hvd.ArgumentError, match="wrap it"):
        stray.apply([keras.ops.ones(2)], [keras.Variable(np.ones(2, "float32"))])
    known = hvd.DistributedOptimizer(keras.optimizers.SGD())
    known.build([keras.Variable(np.ones(2, "float32"))])
    with pytest.raises(ValueError, match="Unknown variable"):
        known.apply([keras.ops.ones(2)], [keras.Variable(np.ones(2, "float32"))])


def scenario_saves_and_loads_with_its_state() -> None:
    model = dense_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    inputs, targets = (mine(part) for part in data(12 * hvd.size()))
    how = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model.fit(inputs, targets, **how)
    with shared_folder() as folder:
        if hvd.rank() == 0:
            model.save(folder / "model.keras")
        hvd.allgather_object("saved")
        plain = keras.models.load_model(folder / "model.keras")
        loaded = hvd.load_model(folder / "model.keras", compression=hvd.Compression.none)
    assert type(plain.optimizer) is optimizer.__class__
    assert int(loaded.optimizer.iterations) == 3
    state = [array(variable) for variable in optimizer.variables]
    assert len(state) == 2 + 2 * 4
    for other in (plain, loaded):
        assert close(other.optimizer.variables, state, 0.0)
    assert tensors_sent_by(lambda: plain.evaluate(inputs, targets, verbose=0)) == 0
    # The loaded optimizer goes on exactly as the saved one.
    assert tensors_sent_by(lambda: loaded.fit(inputs, targets, **how)) == 3 * 4
    model.fit(inputs, targets, **how)
    assert all(
        np.array_equal(a, b) for a, b in zip(weights_of(model), weights_of(loaded), strict=True)
    )
    with pytest.raises(hvd.ArgumentError, match="already"):
        hvd.DistributedOptimizer(loaded.optimizer)


def scenario_loads_optimizers_of_ones_own() -> None:
    class Mine(keras.optimizers.SGD):  # type: ignore[misc,name-defined]
        pass

    @keras.saving.register_keras_serializable("test")
    class Registered(keras.optimizers.SGD):  # type: ignore[misc,name-defined]
        pass

    for make, arguments in ((Mine, {"custom_optimizers": [Mine]}), (Registered, {})):
        model = dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(make(0.1)), loss="mse")
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            loaded = hvd.load_model(Path(folder) / "model.keras", **arguments)
        assert isinstance(loaded.optimizer, make)
        inputs, targets = (mine(part) for part in data(4 * hvd.size()))
        assert (
            tensors_sent_by(lambda model=loaded, x=inputs, y=targets: model.fit(x, y, verbose=0))
            == 4
        )


def scenario_saves_loss_scaling() -> None:
    with mixed_precision():
        model = dense_model(dtype="mixed_float16")
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        inputs, targets = (mine(part) for part in data(8 * hvd.size()))
        model.fit(inputs, targets, batch_size=4, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            plain = keras.models.load_model(Path(folder) / "model.keras")
            loaded = hvd.load_model(Path(folder) / "model.keras")
    assert type(plain.optimizer) is keras.optimizers.LossScaleOptimizer
    assert close(loaded.optimizer.variables, model.optimizer.variables, 0.0)
    assert tensors_sent_by(lambda: loaded.fit(inputs, targets, batch_size=4, verbose=0)) == 2 * 4


def scenario_collectives_of_arrays() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert float(hvd.allreduce(rank + 1.0)) == (size + 1) / 2
    assert hvd.allreduce(np.ones((2, 3)), op=hvd.Sum).tolist() == [[size] * 3] * 2
    assert hvd.allreduce(keras.ops.ones(2), average=False).tolist() == [size] * 2
    rows = hvd.allgather(np.full((rank, 2), rank))
    assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    assert hvd.broadcast(np.array([rank, 5]), root_rank=size - 1).tolist() == [size - 1, 5]
    for kind, total in (("float32", hvd.Sum), ("int64", hvd.Sum), ("float64", hvd.Max)):
        whole = hvd.allreduce(np.arange(2 * size + 2, dtype=kind).reshape(-1, 2), op=total)
        part = hvd.reducescatter(np.arange(2 * size + 2, dtype=kind).reshape(-1, 2), op=total)
        begin = rank + (rank > 0)  # the first rank has one row more
        assert part.dtype == kind and (part == whole[begin : rank + 2]).all()
    assert hvd.reducescatter(keras.ops.ones(1)).shape == (int(rank == 0),)
    with pytest.raises(hvd.ArgumentError, match="dimension"):
        hvd.allgather(3.0)
    with pytest.raises(hvd.ArgumentError, match="dimension"):
        hvd.reducescatter(3.0)
    kinds = ("float32", "float64", "float16", "bfloat16", "int32", "uint32", "bool", "uint8")
    kinds = tuple(kind for kind in kinds if on_tensorflow() or kind != "uint32")
    variables = [
        keras.Variable(np.full((2, i), (rank + i) % 2), dtype=kind, trainable=False)
        for i, kind in enumerate(kinds)
    ]
    hvd.broadcast_variables(variables, root_rank=size - 1)
    for i, variable in enumerate(variables):
        assert (array(variable).astype(int) == (size - 1 + i) % 2).all(), variable
    with pytest.raises(hvd.MismatchError):
        hvd.broadcast_variables([keras.Variable(np.ones(2 + rank))] if size > 1 else _mismatch())


def _mismatch() -> Any:
    raise hvd.MismatchError


def scenario_compiled_loss_scaling() -> None:
    if on_tensorflow():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        fit_with_a_bad_batch(optimizer, jit_compile=True)


def scenario_compiled_passes() -> None:
    if on_tensorflow():
        fit_in_passes(2, True, sgd, jit_compile=True)


def scenario_names_do_not_follow_other_models() -> None:
    if hvd.rank() == 0:
        dense_model()  # Keras numbers names: from here on the ranks' numbers differ.
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    inputs, targets = (mine(part) for part in data(8 * hvd.size()))
    model.fit(inputs, targets, batch_size=4, verbose=0)
    hvd.broadcast_variables(model.weights)
    paths = on_every_rank([weight.path for weight in model.weights])
    assert hvd.size() == 1 or paths[0] != paths[1]


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_optimizer = make_tests(
    body,
    on_backends((1, "torch"), *((2, b) for b in BACKENDS)),
    quick=("2-tensorflow", "2-torch"),
)


def refuse_backend() -> list[str]:
    hvd.init()
    keras.backend.backend = lambda: "jax"  # only its name matters here
    messages = []
    for call in (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()),
        lambda: hvd.Compression,
    ):
        with pytest.raises(hvd.ArgumentError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_other_backends_are_refused() -> None:
    (result,) = run_world(1, refuse_backend, env=environment("torch"))
    for message in result.value:
        assert "jax" in message and "KERAS_BACKEND to tensorflow or torch" in message
