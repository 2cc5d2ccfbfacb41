"""fit() on N ranks equals one process: each gradient is reduced once, in every way to run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.keras.keras_worlds import (
    BACKENDS,
    KERAS_2,
    adam,
    and_legacy,
    array_of,
    close,
    data,
    dense_model,
    hvd,
    keras,
    legacy_adam,
    legacy_sgd,
    mine,
    on_backends,
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
from parallel.scenarios import make_tests, tensors_sent_by

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")
STEPS, EPOCHS, BATCH = 3, 2, 4


def fit(
    make: Callable[[], Any], passes: int = 1, average: bool = True, built: bool = True, **how: Any
) -> None:
    """Every gradient is reduced once per update; the result is that of one process."""
    model, optimizer = dense_model(built=built), make()
    model.compile(
        optimizer=hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=passes, average_aggregated_gradients=average
        ),
        loss="mse",
        **how,
    )
    whole = BATCH * passes * hvd.size()
    inputs, targets = data(whole * STEPS)
    common = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    count = tensors_sent_by(
        lambda: model.fit(mine(inputs), mine(targets), batch_size=BATCH, **common)
    )
    assert count == STEPS * EPOCHS * len(model.trainable_variables)
    assert int(optimizer.iterations) == STEPS * EPOCHS
    assert same_bits(weights_of(model))
    if hvd.rank() == 0:
        alone = dense_model(built=built)
        # A mean over the batches of a step, or their sum.
        alone.compile(optimizer=make(), loss="mse", loss_weights=None if average else float(passes))
        alone.fit(inputs, targets, batch_size=whole, **common)
        assert close(weights_of(model), weights_of(alone))


def scenario_in_functions() -> None:
    for make in and_legacy(adam):
        fit(make)


def scenario_run_eagerly() -> None:
    for make in and_legacy(sgd):
        fit(make, run_eagerly=True)


def scenario_model_that_the_first_batch_builds() -> None:
    if not on_keras_2():  # where seeds are drawn when a layer is built
        fit(lambda: keras.optimizers.AdamW(0.01), built=False)


def scenario_passes_are_summed() -> None:
    fit(legacy_adam if on_keras_2() else sgd, passes=2, average=False)


def scenario_passes_are_averaged_eagerly() -> None:
    fit(adam, passes=3, run_eagerly=True)


def scenario_passes_of_several_steps_at_once() -> None:
    if on_tensorflow():  # Keras refuses it on PyTorch.
        fit(sgd, passes=2, steps_per_execution=3)


def trace_only() -> None:
    """Only the trace matters here; generating C++ from it takes half a minute."""
    if not on_tensorflow():
        import torch

        if not isinstance(torch.compile, functools.partial):
            torch.compile = functools.partial(torch.compile, backend="eager")


def scenario_jit_compile() -> None:
    trace_only()
    for make in and_legacy(adam):
        fit(make, jit_compile=True)
    if on_tensorflow() and not on_keras_2():
        fit(sgd, passes=2, jit_compile=True)


def fit_embedding(make: Callable[[], Any], passes: int = 1, **arguments: Any) -> None:
    keras.utils.set_random_seed(11)
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(800, 2)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    initial = model.get_weights()
    jit_compile = arguments.pop("jit_compile", False)
    optimizer = hvd.DistributedOptimizer(
        make(),
        backward_passes_per_step=passes,
        average_aggregated_gradients=True,
        **arguments,
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    tokens = np.random.default_rng(0).integers(0, 800, (12 * passes * hvd.size(), 3))
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
        model.compile(optimizer=make(), loss="mse")
        model.fit(tokens, targets, batch_size=4 * passes * hvd.size(), shuffle=False, verbose=0)
        assert close(trained, weights_of(model))


def scenario_embedding() -> None:
    for make in [lambda: keras.optimizers.SGD(0.5), *([legacy_sgd] if on_keras_2() else [])]:
        fit_embedding(make)
    fit_embedding(sgd, sparse_as_dense=True)
    if not on_keras_2():
        fit_embedding(sgd, passes=2)
        fit_embedding(sgd, jit_compile=on_tensorflow())  # dense, since XLA cannot gather rows


def scenario_rows_that_travel_are_those_of_one_process() -> None:
    """The same rows are on several ranks, several times; Adam squares each one's sum."""
    if on_keras_2():
        return
    words = np.random.default_rng(1).integers(1, 60, (16 * hvd.size(), 6)) * 50
    wanted = (words.sum(1) > 8800).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def make() -> Any:
        keras.utils.set_random_seed(0)
        table = keras.layers.Embedding(3000, 8)
        return keras.Sequential(
            [keras.Input((6,)), table, keras.layers.Flatten(), keras.layers.Dense(2)]
        )

    model = make()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss)
    model.fit(mine(words), mine(wanted), batch_size=8, shuffle=False, verbose=0)
    assert same_bits(weights_of(model))
    if hvd.rank() > 0:
        return
    twin, optimizer = make(), keras.optimizers.Adam(0.01)
    for batch in np.split(np.arange(len(words)), 2):
        step_densely(twin, optimizer, loss, words[batch], wanted[batch])
    assert close(weights_of(model), weights_of(twin), 1e-5)


def step_densely(model: Any, optimizer: Any, loss: Any, inputs: Any, wanted: Any) -> None:
    """Step with dense gradients, since Keras squares each row of a sparse one by itself."""
    if not on_tensorflow():
        model.compile(optimizer, loss)
        model.train_on_batch(inputs, wanted)
        return
    with tf.GradientTape() as tape:
        value = loss(wanted, model(inputs, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply([tf.convert_to_tensor(one) for one in gradients], model.trainable_variables)


def scenario_a_loop_of_ones_own() -> None:
    """Models trained in turns, with optimizers that have some of the variables each."""
    model = dense_model()
    first, second = (hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2))
    first.build(model.trainable_variables)
    gradients = [
        tensor_of(np.full(variable.shape, hvd.rank() + 1)) for variable in model.trainable_variables
    ]
    expected = (hvd.size() + 1) / 2
    for optimizer, part in ((first, slice(2, 4)), (second, slice(0, 2))):
        before = weights_of(model)
        pairs = list(zip(gradients[part], model.trainable_variables[part], strict=True))
        assert tensors_sent_by(lambda pairs=pairs, by=optimizer: by.apply_gradients(pairs)) == 2
        for was, now in list(zip(before, weights_of(model), strict=True))[part]:
            assert np.allclose(was - now, 0.1 * expected, atol=1e-6)


def scenario_a_variable_without_a_gradient_in_keras_2() -> None:
    if on_keras_2():
        for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
            optimizer = hvd.DistributedOptimizer(make(1.0), op=hvd.Sum)
            used, unused = variable_of([0.0, 0.0]), variable_of(1.0)
            optimizer.apply_gradients([(None, unused), (tensor_of([1.0, hvd.rank() + 1.0]), used)])
            size = hvd.size()
            assert used.numpy().tolist() == [-size, -size * (size + 1) / 2]
            assert float(unused) == 1.0


def scenario_arguments_change_the_sum() -> None:
    average = (hvd.size() + 1) / 2 / 3
    for arguments, expected, tolerance in (
        ({}, average, 1e-12),  # as exact as float64 is
        ({"op": hvd.Sum}, average * hvd.size(), 1e-12),
        ({"gradient_predivide_factor": 2.0}, average, 1e-12),
        ({"compression": hvd.Compression.fp16}, average, 1e-3),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, average * hvd.size(), 1e-2),
        ({"name": "mine", "device_dense": "/gpu:0", "device_sparse": "", "num_groups": 2},
         average, 1e-12),
    ):  # fmt: skip
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
        variable = variable_of(np.zeros((2, 3)), "float64")
        gradient = tensor_of(np.full((2, 3), (hvd.rank() + 1) / 3), "float64")
        optimizer.apply_gradients([(gradient, variable)])
        assert np.allclose(array_of(variable), -expected, rtol=tolerance, atol=0), arguments


def scenario_local_layer() -> None:
    """The local layer learns from this rank's samples alone, the other from all."""
    for scale, op, divisor in ((True, hvd.Average, hvd.size()), (False, hvd.Sum, 1)):
        model, alone = dense_model(), dense_model()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1),
            op=op,
            local_layers=[model.layers[-1]],
            scale_local_gradients=scale,
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


def scenario_local_variables_say_what_they_cannot() -> None:
    with pytest.raises(hvd.ArgumentError, match="'dense.*' has no weights yet"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(1, name="dense_without")
        )
    if on_keras_2():
        return
    variable = variable_of(np.zeros(2))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer = hvd.DistributedOptimizer(scaler)
    optimizer.register_local_var(variable)
    with pytest.raises(hvd.ArgumentError, match="do not work with loss scaling"):
        optimizer.apply([keras.ops.ones(2)], [variable])


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
    """Compile an update as `fit` does with jit_compile=True."""
    import torch

    def update(gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return torch.compile(update)


def scenario_every_optimizer_reduces_once_in_functions_that_are_compiled() -> None:
    """On PyTorch all but SGD were traced without their reduction."""
    if on_tensorflow():
        return
    trace_only()
    for name, make in optimizers_of_keras().items():
        variables, alone = ([variable_of(np.ones(s)) for s in ((4, 3), (3,))] for _ in range(2))
        reference, optimizer = make(), hvd.DistributedOptimizer(make())
        optimizer.build(variables)
        reference.build(alone)
        generator = np.random.default_rng(5)
        gradients = [generator.normal(size=(hvd.size(), *v.shape)) for v in variables]
        scale = float(getattr(reference, "dynamic_scale", 1.0))
        own = [tensor_of(one[hvd.rank()] * scale) for one in gradients]
        mean = [tensor_of(one.mean(0) * scale) for one in gradients]
        step = compiled_update(optimizer, variables)
        for _ in range(2):
            assert tensors_sent_by(lambda s=step, g=own: s(list(g))) == 2, name
            reference.apply(list(mean), alone)
        arrays = [array_of(one) for one in variables]
        assert same_bits(arrays), name
        for ours, theirs in zip(arrays, alone, strict=True):
            assert np.allclose(ours, array_of(theirs), rtol=1e-4, atol=1e-5), (name, ours)
        assert int(optimizer.iterations) == 2


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_fit = make_tests(body, on_backends(*((2, backend) for backend in (*BACKENDS, KERAS_2))))
