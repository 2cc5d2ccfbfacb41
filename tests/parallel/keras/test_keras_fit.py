"""model.fit reduces every gradient once per step, with every optimizer and every way to run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.keras.keras_worlds import (
    BACKENDS,
    data,
    dense_model,
    hvd,
    keras,
    mine,
    on_backends,
    on_tensorflow,
    run_scenarios,
    same_bits,
    weights_of,
)
from parallel.scenarios import make_tests, tensors_sent_by

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")
STEPS, EPOCHS, BATCH = 3, 2, 4


def fit(model: Any, optimizer: Any, **how: Any) -> None:
    """Fit and check that each of the model's variables was reduced once per step."""
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse", **how)
    inputs, targets = data(STEPS * BATCH * hvd.size())
    count = tensors_sent_by(
        lambda: model.fit(
            mine(inputs), mine(targets), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0
        )
    )
    assert count == STEPS * EPOCHS * len(model.trainable_variables)
    assert int(optimizer.iterations) == STEPS * EPOCHS
    assert same_bits(weights_of(model))


def scenario_adam_with_global_clipnorm() -> None:
    fit(dense_model(), keras.optimizers.Adam(0.01, global_clipnorm=0.1))


def scenario_model_that_the_first_batch_builds() -> None:
    fit(dense_model(built=False), keras.optimizers.AdamW(0.01))


def scenario_run_eagerly() -> None:
    fit(dense_model(), keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True)


def scenario_steps_per_execution() -> None:
    if on_tensorflow():  # Keras refuses it on PyTorch.
        fit(dense_model(), keras.optimizers.Adam(0.01), steps_per_execution=2)


def scenario_frozen_layer() -> None:
    model = dense_model()
    model.layers[0].trainable = False
    before = weights_of(model)
    fit(model, keras.optimizers.SGD(0.1, momentum=0.9))
    assert np.array_equal(before[0], weights_of(model)[0])
    assert not np.array_equal(before[2], weights_of(model)[2])


def fit_embedding(words: int = 8, jit_compile: bool = False, **arguments: Any) -> None:
    keras.utils.set_random_seed(11)
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(words, 2)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    initial = model.get_weights()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), **arguments)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    tokens = np.random.default_rng(0).integers(0, words, (12 * hvd.size(), 3))
    targets = np.random.default_rng(1).normal(size=(len(tokens), 1)).astype("float32")
    count = tensors_sent_by(
        lambda: model.fit(mine(tokens), mine(targets), batch_size=4, shuffle=False, verbose=0)
    )
    if "sparse_as_dense" in arguments or not on_tensorflow():
        assert count == 3 * len(model.trainable_variables)
    trained = weights_of(model)
    assert same_bits(trained)
    if hvd.rank() == 0:  # alone
        model.set_weights(initial)
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        model.fit(tokens, targets, batch_size=4 * hvd.size(), shuffle=False, verbose=0)
        for ours, theirs in zip(trained, weights_of(model), strict=True):
            assert np.allclose(ours, theirs, atol=1e-6)


def scenario_embedding() -> None:
    for words in (8, 800):  # on TensorFlow dense, and by rows
        fit_embedding(words)
    if on_tensorflow():
        fit_embedding(800, jit_compile=True)  # dense, since XLA cannot gather rows


def scenario_embedding_made_dense() -> None:
    fit_embedding(sparse_as_dense=True)


def scenario_a_loop_of_ones_own() -> None:
    """Models trained in turns, with optimizers that have some of the variables each."""
    model = dense_model()
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    second = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    first.build(model.trainable_variables)
    gradients = [
        keras.ops.full(variable.shape, float(hvd.rank() + 1))
        for variable in model.trainable_variables
    ]
    expected = (hvd.size() + 1) / 2
    for optimizer, part in ((first, slice(2, 4)), (second, slice(0, 2))):
        before = weights_of(model)
        pairs = list(zip(gradients[part], model.trainable_variables[part], strict=True))
        assert tensors_sent_by(lambda pairs=pairs, by=optimizer: by.apply_gradients(pairs)) == 2
        for was, now in list(zip(before, weights_of(model), strict=True))[part]:
            assert np.allclose(was - now, 0.1 * expected, atol=1e-6)


def scenario_arguments_change_the_sum() -> None:
    average = (hvd.size() + 1) / 2
    for arguments, expected in (
        ({}, average),
        ({"op": hvd.Sum}, average * hvd.size()),
        ({"gradient_predivide_factor": 2.0}, average),
        ({"compression": hvd.Compression.fp16}, average),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, average * hvd.size()),
        ({"name": "mine", "device_dense": "/gpu:0", "device_sparse": "", "num_groups": 2}, average),
    ):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
        variable = keras.Variable(np.zeros((2, 3), "float32"))
        optimizer.apply([keras.ops.full((2, 3), float(hvd.rank() + 1))], [variable])
        assert np.allclose(keras.ops.convert_to_numpy(variable), -expected), arguments


def fit_with_a_local_layer(scale: bool, op: Any, divisor: int) -> None:
    """The local layer learns from this rank's samples alone, the other from all."""
    model, alone = dense_model(), dense_model()
    head = model.layers[-1]
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), op=op, local_layers=[head], scale_local_gradients=scale
    )
    model.compile(optimizer=optimizer, loss="mse")
    inputs, targets = (mine(part) for part in data(4 * hvd.size()))
    before = weights_of(model)
    fit = functools.partial(model.fit, inputs, targets, batch_size=4, verbose=0)
    assert tensors_sent_by(fit) == 2
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    alone.fit(inputs, targets, batch_size=4, verbose=0)
    for i in (2, 3):
        step, whole = weights_of(model)[i] - before[i], weights_of(alone)[i] - before[i]
        assert np.allclose(step, whole / divisor, atol=1e-6)
    assert same_bits(weights_of(model)[:2])
    assert not same_bits(weights_of(model)[2:])


def scenario_local_layer() -> None:
    fit_with_a_local_layer(scale=True, op=hvd.Average, divisor=hvd.size())


def scenario_local_layer_without_scale() -> None:
    fit_with_a_local_layer(scale=False, op=hvd.Sum, divisor=1)


def scenario_local_variables_say_what_they_cannot() -> None:
    with pytest.raises(hvd.ArgumentError, match="'dense.*' has no weights yet"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(1, name="dense_without")
        )
    variable = keras.Variable(np.zeros(2, "float32"))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer = hvd.DistributedOptimizer(scaler)
    optimizer.register_local_var(variable)
    with pytest.raises(hvd.ArgumentError, match="do not work with loss scaling"):
        optimizer.apply([keras.ops.ones(2)], [variable])


def compiled(function: Any) -> Any:
    """Compile as `fit` does with jit_compile=True."""
    if on_tensorflow():
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    import torch

    return torch.compile(function)


def trace_only() -> None:
    """Only the trace matters here; generating C++ from it takes half a minute."""
    if not on_tensorflow():
        import torch

        if not isinstance(torch.compile, functools.partial):
            torch.compile = functools.partial(torch.compile, backend="eager")


def scenario_jit_compile() -> None:
    trace_only()
    fit(dense_model(), keras.optimizers.Adam(0.01), jit_compile=True)


def optimizers_of_keras() -> dict[str, Callable[[], Any]]:
    """Return a factory for every optimizer class of Keras, by name."""
    module = keras.optimizers
    offered = {name: getattr(module, name) for name in dir(module)}
    around_others = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    makers = {
        name: functools.partial(kind, 0.01)
        for name, kind in sorted(offered.items())
        if isinstance(kind, type)
        and issubclass(kind, module.Optimizer)
        and name not in around_others
    }
    assert len(makers) >= 12
    makers["LossScaleOptimizer"] = lambda: module.LossScaleOptimizer(module.Adam(0.01))
    if "MultiOptimizer" in offered:  # since Keras 3.14
        makers["MultiOptimizer"] = one_optimizer_for_each_rank_of_tensor
    return makers


def one_optimizer_for_each_rank_of_tensor() -> Any:
    by_rank = {2: keras.optimizers.SGD(0.01), 1: keras.optimizers.Adam(0.01)}
    return keras.optimizers.MultiOptimizer(lambda variable: by_rank[len(variable.shape)])


def compiled_update(optimizer: Any, variables: list[Any]) -> Any:
    def update(gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return compiled(update)


def scenario_every_optimizer_reduces_once_in_functions_that_are_compiled() -> None:
    """On PyTorch all but SGD were traced without their reduction."""
    trace_only()
    for name, make in optimizers_of_keras().items():
        variables = [keras.Variable(np.ones(shape, "float32")) for shape in ((4, 3), (3,))]
        alone = [keras.Variable(np.ones(shape, "float32")) for shape in ((4, 3), (3,))]
        reference, optimizer = make(), hvd.DistributedOptimizer(make())
        optimizer.build(variables)
        reference.build(alone)
        generator = np.random.default_rng(5)
        gradients = [generator.normal(size=(hvd.size(), *v.shape)) for v in variables]
        scale = float(getattr(reference, "dynamic_scale", 1.0))
        own = [keras.ops.convert_to_tensor(one[hvd.rank()] * scale, "float32") for one in gradients]
        mean = [keras.ops.convert_to_tensor(one.mean(0) * scale, "float32") for one in gradients]
        step = compiled_update(optimizer, variables)
        for _ in range(2):
            assert tensors_sent_by(lambda s=step, g=own: s(list(g))) == 2, name
            reference.apply(list(mean), alone)
        assert same_bits([keras.ops.convert_to_numpy(one) for one in variables]), name
        for ours, theirs in zip(variables, alone, strict=True):
            a, b = keras.ops.convert_to_numpy(ours), keras.ops.convert_to_numpy(theirs)
            assert np.allclose(a, b, rtol=1e-4, atol=1e-5), (name, a, b)
        assert int(optimizer.iterations) == 2


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_fit = make_tests(body, on_backends(*((2, backend) for backend in BACKENDS)))
