"""DistributedOptimizer of Keras: loss scaling, wrapping, saving and loading."""

from __future__ import annotations

import importlib
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from parallel.keras.keras_worlds import (
    BACKENDS,
    KERAS_2,
    adam,
    and_legacy,
    array_of,
    close,
    data,
    dense_model,
    environment,
    hvd,
    keras,
    legacy_adam,
    mine,
    mixed_precision,
    on_backends,
    on_every_rank,
    on_keras_2,
    on_tensorflow,
    run_scenarios,
    same_bits,
    sgd,
    tensor_of,
    tf,
    variable_of,
    weights_of,
)
from parallel.scenarios import make_tests, raises, tensors_sent_by

PRELOAD = ("keras", "tensorflow")


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Return a new folder, the same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(hvd.broadcast_object(own))
        hvd.allgather_object("all are done with it")


def scaled(optimizer: Any) -> Any:
    kind = keras.mixed_precision.LossScaleOptimizer
    return kind(optimizer, initial_scale=2.0**10)  # no overflow except the one that a test makes


def fit_with_a_bad_batch(optimizer: Any, **how: Any) -> None:
    """One rank's third batch of four is infinite: all ranks skip that step, and only that."""
    with mixed_precision():
        model = dense_model(dtype="mixed_float16")
        model.compile(optimizer=optimizer, loss="mse", **how)
    scaler = model.optimizer
    assert type(scaler).__name__.startswith("LossScaleOptimizer")
    if not on_keras_2():
        scaler.initial_scale = 2.0**10
    inputs, targets = data(16 * hvd.size())
    inputs, targets = mine(inputs).copy(), mine(targets)
    if hvd.rank() == 0:
        inputs[8] = np.inf
    count = tensors_sent_by(
        lambda: model.fit(inputs, targets, batch_size=4, epochs=1, shuffle=False, verbose=0)
    )
    assert count == 4 * len(model.trainable_variables)
    counted = 4 if on_keras_2() else 3  # Keras 2 counts the skipped step, too.
    assert int(scaler.inner_optimizer.iterations) == counted
    assert float(scaler.loss_scale if on_keras_2() else array_of(scaler.dynamic_scale)) == 2.0**9
    assert all(np.isfinite(weight).all() for weight in weights_of(model))
    assert same_bits(weights_of(model))


def scenario_imports_no_other_framework() -> None:
    assert "hvdlite.keras" in sys.modules
    hvd.DistributedOptimizer(keras.optimizers.SGD())
    if on_tensorflow():
        importlib.import_module("hvdlite.tensorflow")
        assert "torch" not in sys.modules
        assert on_keras_2() or "tf_keras" not in sys.modules
    else:
        assert "hvdlite.tensorflow" not in sys.modules


def scenario_loss_scaling_that_compile_adds() -> None:
    if not on_keras_2():  # as in scenario_loss_scaling_outside
        fit_with_a_bad_batch(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))


def scenario_loss_scaling_eagerly() -> None:
    fit_with_a_bad_batch(scaled(hvd.DistributedOptimizer(sgd())), run_eagerly=True)


def scenario_loss_scaling_inside() -> None:
    for make in and_legacy(adam):
        fit_with_a_bad_batch(hvd.DistributedOptimizer(scaled(make())))


def scenario_loss_scaling_outside() -> None:
    for make in and_legacy(adam):
        fit_with_a_bad_batch(scaled(hvd.DistributedOptimizer(make())))


def scenario_compiled_loss_scaling() -> None:
    if on_tensorflow() and not on_keras_2():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        fit_with_a_bad_batch(optimizer, jit_compile=True)


def scenario_loss_scaling_without_us_stays_as_it_is() -> None:
    if on_keras_2():
        return
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    variable = keras.Variable(np.ones(2, "float32"))
    assert tensors_sent_by(lambda: scaler.apply([keras.ops.ones(2)], [variable])) == 0


def scenario_static_loss_scale_sees_averages() -> None:
    if on_keras_2():
        return
    optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=4.0)
    variable = variable_of(np.zeros(2))
    gradient = tensor_of(np.full(2, 4.0 * (hvd.rank() + 1)))
    hvd.DistributedOptimizer(optimizer).apply([gradient], [variable])
    assert np.allclose(array_of(variable), -(hvd.size() + 1) / 2)


def scenario_passes_with_loss_scaling() -> None:
    if on_keras_2():  # which refuses it: scenario_misuse_in_keras_2
        return
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


def scenario_keeps_its_class_and_state() -> None:
    for make in and_legacy(adam):
        optimizer = make()
        plain = type(optimizer)
        variables = dense_model().trainable_variables
        pairs = [(tensor_of(np.ones(variable.shape)), variable) for variable in variables]
        optimizer.apply_gradients(pairs)
        state = optimizer.variables if not on_keras_2() else optimizer.variables()
        before = [array_of(variable) for variable in state]
        config = keras.optimizers.serialize(optimizer)
        assert hvd.DistributedOptimizer(optimizer) is optimizer
        assert optimizer.__class__ is plain and type(optimizer).__name__ == "Adam"
        assert keras.optimizers.serialize(optimizer) == config
        assert int(optimizer.iterations) == 1
        state = optimizer.variables if not on_keras_2() else optimizer.variables()
        assert close(before, [array_of(variable) for variable in state], 0.0)
        stray = type(optimizer).from_config(optimizer.get_config())
        with raises(hvd.ArgumentError, "wrap it"):
            stray.apply_gradients(pairs)
    if not on_keras_2():
        assert type(keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))) is plain
        unbuilt = hvd.DistributedOptimizer(adam())
        assert type(pickle.loads(pickle.dumps(unbuilt))) is plain


def scenario_gradients_of_the_caller_stay_as_they_are() -> None:
    """Also those that one tensor is for several variables."""
    ranks = range(1, hvd.size() + 1)
    for op, total in ((hvd.Sum, sum(ranks)), (hvd.Average, sum(ranks) / hvd.size())):
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            pair = [variable_of(np.zeros(4)) for _ in range(2)]
            optimizer = keras.optimizers.SGD(1.0)
            hvd.DistributedOptimizer(optimizer, op=op, compression=compression)
            gradient = tensor_of(np.full(4, hvd.rank() + 1))
            optimizer.apply_gradients([(gradient, variable) for variable in pair])
            for variable in pair:
                assert np.allclose(array_of(variable), -total)
            assert np.all(array_of(gradient) == hvd.rank() + 1)


def scenario_strategies_are_refused() -> None:
    if not on_tensorflow():
        return
    refused = pytest.raises(hvd.ArgumentError, match="scope of a MirroredStrategy.*-np N")
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope(), refused:
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def scenario_misuse_says_what_to_do() -> None:
    for make in and_legacy(sgd):
        optimizer = hvd.DistributedOptimizer(make())
        with raises(hvd.ArgumentError, "already"):
            hvd.DistributedOptimizer(optimizer)
        with raises(hvd.ArgumentError, "already"):
            hvd.DistributedOptimizer(scaled(optimizer))
        for arguments, text in (
            ({"op": hvd.Max}, "op=hvd.Max makes no gradient"),
            ({"gradient_predivide_factor": 0.0}, "positive"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "combined with op=hvd.Sum"),
            ({"backward_passes_per_step": 0}, "at least 1"),
        ):
            with raises(hvd.ArgumentError, text):
                hvd.DistributedOptimizer(make(), **arguments)
    if on_keras_2():
        with raises(hvd.ArgumentError, "one of tf_keras"):
            hvd.DistributedOptimizer(keras.layers.Dense(1))
        return
    with raises(hvd.ArgumentError, "keras.optimizers.Adam"):
        hvd.DistributedOptimizer("adam")
    accumulates = keras.optimizers.SGD(gradient_accumulation_steps=4)
    for optimizer in (accumulates, keras.optimizers.LossScaleOptimizer(accumulates)):
        text = "backward_passes_per_step=4, average_aggregated_gradients=True"
        with raises(hvd.ArgumentError, text):
            hvd.DistributedOptimizer(optimizer)
    known = hvd.DistributedOptimizer(keras.optimizers.SGD())
    known.build([variable_of(np.ones(2))])
    with raises(ValueError, "Unknown variable"):
        known.apply([keras.ops.ones(2)], [variable_of(np.ones(2))])


def scenario_misuse_in_keras_2() -> None:
    for make in and_legacy(sgd) if on_keras_2() else []:
        scaler = scaled(hvd.DistributedOptimizer(make(), backward_passes_per_step=2))
        model = dense_model()
        model.compile(optimizer=scaler, loss="mse", run_eagerly=True)
        with raises(hvd.ArgumentError, "does not work with the loss scaling"):
            model.fit(*data(4), verbose=0)
        optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2)
        optimizer.apply_gradients([(tensor_of(1.0), variable_of(1.0))])
        with raises(hvd.ArgumentError, "of its first step only"):
            optimizer.apply_gradients([(tensor_of(1.0), variable_of(1.0))])


def scenario_saves_and_loads_with_its_state() -> None:
    """The loaded optimizer goes on exactly as the saved one."""
    files = [(adam, "model.keras")]
    if on_keras_2():
        files += [(adam, "model.h5"), (legacy_adam, "model.h5")]
    inputs, targets = (mine(part) for part in data(12 * hvd.size()))
    how = {"batch_size": 4, "shuffle": False, "verbose": 0}
    for make, name in files:
        model = dense_model()
        optimizer = hvd.DistributedOptimizer(make())
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        model.fit(inputs, targets, **how)
        with shared_folder() as folder:
            if hvd.rank() == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Keras's own warning about the older format
                    model.save(folder / name)
            hvd.allgather_object("saved")
            plain = keras.models.load_model(folder / name)
            loaded = plain
            if not on_keras_2():
                loaded = hvd.load_model(folder / name, compression=hvd.Compression.none)
        assert type(plain.optimizer) is optimizer.__class__
        assert tensors_sent_by(lambda m=plain: m.evaluate(inputs, targets, verbose=0)) == 0
        if on_keras_2():
            hvd.DistributedOptimizer(loaded.optimizer)
        with raises(hvd.ArgumentError, "already"):
            hvd.DistributedOptimizer(loaded.optimizer)
        assert int(loaded.optimizer.iterations) == 3
        assert tensors_sent_by(lambda m=loaded: m.fit(inputs, targets, **how)) == 3 * 4
        model.fit(inputs, targets, **how)
        assert close(weights_of(model), weights_of(loaded), 0.0)


def scenario_loads_optimizers_of_ones_own() -> None:
    if on_keras_2():
        return

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
    if on_keras_2():
        return
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
    states = ([array_of(one) for one in of.optimizer.variables] for of in (loaded, model))
    assert close(*states, 0.0)
    assert tensors_sent_by(lambda: loaded.fit(inputs, targets, batch_size=4, verbose=0)) == 2 * 4


def scenario_collectives_of_arrays() -> None:
    if on_keras_2():
        return
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
        assert (array_of(variable).astype(int) == (size - 1 + i) % 2).all(), variable
    with pytest.raises(hvd.MismatchError):
        hvd.broadcast_variables([keras.Variable(np.ones(2 + rank))] if size > 1 else _mismatch())


def _mismatch() -> Any:
    raise hvd.MismatchError


def scenario_names_do_not_follow_other_models() -> None:
    if hvd.rank() == 0:
        dense_model()  # Keras numbers names: from here on the ranks' numbers differ.
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    inputs, targets = (mine(part) for part in data(8 * hvd.size()))
    model.fit(inputs, targets, batch_size=4, verbose=0)
    hvd.broadcast_variables(model.weights)
    names = on_every_rank([getattr(weight, "path", weight.name) for weight in model.weights])
    assert hvd.size() == 1 or names[0] != names[1]


def scenario_gradients_that_are_arrays() -> None:
    """Keras takes them on each backend."""
    if on_keras_2():
        return
    variable = variable_of(np.zeros(3))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([np.full(3, hvd.rank() + 1.0, np.float32)], [variable])
    assert array_of(variable).tolist() == [-(hvd.size() + 1) / 2] * 3


def scenario_trainer_that_reduces_by_torch_distributed() -> None:
    """Keras 3.16 wraps a model in DistributedDataParallel if there is a process group."""
    if on_tensorflow() or on_keras_2():
        return
    import torch

    class Trainer316(keras.Sequential):  # type: ignore[misc]
        def _should_torch_compile(self) -> Any:
            """Wrap the model, as `make_train_function` and `make_test_function` would."""
            if torch.distributed.is_initialized():
                wrapped = torch.nn.parallel.DistributedDataParallel(self)
                object.__setattr__(self, "ddp_model", wrapped)
            return super()._should_torch_compile()

    def fitted(kind: Any, op: int) -> list[Any]:
        model = kind(dense_model().layers)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=op), "mse")
        model.fit(*(mine(part) for part in data(8 * hvd.size())), batch_size=4, verbose=0)
        return weights_of(model)

    alone = fitted(Trainer316, hvd.Sum)
    with shared_folder() as folder:
        store = torch.distributed.FileStore(str(folder / "store"), hvd.size())
        torch.distributed.init_process_group(
            "gloo", store=store, rank=hvd.rank(), world_size=hvd.size()
        )
        try:
            assert close(alone, fitted(keras.Sequential, hvd.Sum), 0)
            if hvd.size() == 1:
                assert close(alone, fitted(Trainer316, hvd.Sum), 0)
                return
            with raises(hvd.ArgumentError, "by torch.distributed.* a second time; leave out"):
                fitted(Trainer316, hvd.Sum)
            model = hvd.distribute(Trainer316(dense_model().layers))
            model.compile("sgd", "mse")
            for call in (model.fit, model.evaluate):
                with raises(hvd.ArgumentError, "a second time"):
                    call(*data(8), verbose=0)
        finally:
            torch.distributed.destroy_process_group()


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_optimizer = make_tests(
    body,
    on_backends((1, "torch"), *((2, b) for b in (*BACKENDS, KERAS_2))),
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
