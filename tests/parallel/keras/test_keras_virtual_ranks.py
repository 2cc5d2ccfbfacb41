"""Virtual ranks in a custom loop of Keras: the same bits on any number of ranks."""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from hvdlite.virtual.generators import seed_of
from parallel.keras.keras_worlds import (
    BACKENDS,
    environment,
    hvd,
    keras,
    on_backends,
    on_tensorflow,
    run_scenarios,
)
from parallel.scenarios import make_tests

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")

VIRTUAL_SIZE = 4
STEPS = 2  # of an epoch
EPOCHS = 2
BATCH = 8
SEED = 5


def begin() -> None:
    if on_tensorflow():
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.experimental.enable_op_determinism()
    else:
        import torch

        torch.set_num_threads(1)
    hvd.init()


def network() -> tuple[Any, Any, Any]:
    """Make a model with dropout and batch normalization, its optimizer and its data."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.SpatialDropout2D(0.2),
        layers.Flatten(),
        layers.Dense(16, activation="gelu"),
        layers.Dropout(0.3),
        layers.Dense(10),
    ])  # fmt: skip
    return model, keras.optimizers.SGD(0.05, momentum=0.9), image_data()


def image_data(dtype: str = "float32") -> tuple[Any, Any]:
    generator = np.random.default_rng(2)
    samples = VIRTUAL_SIZE * STEPS * BATCH + 3
    images = generator.normal(size=(samples, 8, 8, 1)).astype(dtype)
    return images, generator.integers(0, 10, samples)


def transformer() -> tuple[Any, Any, Any]:
    """Make a layer with attention over an embedding, and an optimizer that clips."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 8)(tokens)
    hidden = hidden + layers.MultiHeadAttention(2, 4, dropout=0.1)(hidden, hidden)
    hidden = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden))
    model = keras.Model(tokens, layers.Dense(10)(hidden))
    images, targets = image_data()
    data = (images[:, 0, :6, 0] * 4).astype("int32") % 20, targets
    return model, keras.optimizers.AdamW(0.01, global_clipnorm=0.5), data


def mixed() -> tuple[Any, Any, Any]:
    """Make a model that computes in bfloat16, with variables of float32."""
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(12, "tanh", dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, dtype="float32")])
    images, targets = image_data()
    return model, keras.optimizers.SGD(0.05), (images.reshape(-1, 64), targets)


KINDS = {"network": network, "transformer": transformer, "mixed": mixed}


def gradients_of(model: Any, compiled: bool = True) -> Callable[..., Any]:
    """Make the function that gives the loss and the gradients, as a user writes it."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if on_tensorflow():
        import tensorflow as tf

        def with_tape(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(inputs, training=True))
            return loss, tape.gradient(loss, model.trainable_variables)

        inner = tf.function(with_tape) if compiled else with_tape
    else:

        def inner(inputs: Any, targets: Any) -> Any:
            loss = loss_of(targets, model(inputs, training=True))
            model.zero_grad()
            loss.backward()
            return loss, [variable.value.grad for variable in model.trainable_variables]

    def noisy(inputs: Any, targets: Any) -> Any:
        if inputs.dtype == np.float32:
            inputs = inputs * np.float32(random.random() + np.random.rand())
        loss, gradients = inner(inputs, targets)
        if random.random() < 0.3:
            gradients = [None, *gradients[1:]]  # Some virtual ranks do not use a variable.
        return loss, gradients

    return noisy


def digest(model: Any, optimizer: Any, losses: list[float | None]) -> str:
    made = hashlib.sha256(repr(losses).encode())
    for variable in [*model.weights, *optimizer.variables]:
        made.update(keras.ops.convert_to_numpy(variable).tobytes())
    return made.hexdigest()


def hashes() -> dict[str, list[str]]:
    """Train on virtual ranks, and hash what there is after each step."""
    begin()
    return {kind: train(*make()) for kind, make in KINDS.items()}


def train(
    model: Any, optimizer: Any, data: Any, losses: list[Any] | None = None, stop: int = 0
) -> list[str]:
    """Train on virtual ranks, from the step of the optimizer on and up to step `stop`, if given."""
    batches = hvd.VirtualBatches(*data, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=SEED)
    losses = [] if losses is None else losses
    compute, found = gradients_of(model), []
    done = int(optimizer.iterations)
    for epoch in range(EPOCHS):
        for step in hvd.virtual_steps(batches, epoch, model, done=done):
            optimizer.apply(step.gradients(compute), model.trainable_variables)
            losses.append(step.loss)
            found.append(digest(model, optimizer, losses))
            if len(losses) == stop:
                return found
    return found


def tree(parts: list[Any]) -> Any:
    half = len(parts) // 2
    return parts[0] if half == 0 else tree(parts[:half]) + tree(parts[half:])


def hashes_alone() -> dict[str, list[str]]:
    """Train in one process of plain Keras, and add up in a tree by recursion."""
    begin()
    return {kind: train_alone(*make()) for kind, make in KINDS.items()}


def train_alone(model: Any, optimizer: Any, data: Any) -> list[str]:
    batches = hvd.VirtualBatches(*data, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=SEED)
    compute, losses, found = gradients_of(model), [], []
    moments = [one for one in model.non_trainable_weights if "moving" in one.path]
    states = [one for one in model.variables if one.path.endswith("seed_generator_state")]
    assert len(states) == (2 if moments else 1) or model.layers[0].compute_dtype == "bfloat16"
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            before = [keras.ops.convert_to_numpy(one) for one in moments]
            parts, after, of_step = [], [], []
            for virtual_rank in range(VIRTUAL_SIZE):
                for moment, value in zip(moments, before, strict=True):
                    moment.assign(value)
                seeds = SEED, epoch, step, virtual_rank
                random.seed(seed_of(*seeds))
                np.random.seed(seed_of(*seeds) % 2**32)
                if not on_tensorflow():
                    import torch

                    torch.manual_seed(seed_of(*seeds))  # Dropout of Keras draws from it.
                for i, state in enumerate(states):
                    state.assign(np.array([seed_of(*seeds, i) % 2**31, 0], state.dtype))
                loss, gradients = compute(*batches.batch(epoch, step, virtual_rank))
                of_step.append(np.float64(float(loss)))
                whole = [
                    np.zeros(variable.shape, "float32")
                    if one is None
                    else np.array(keras.ops.convert_to_numpy(one))
                    for one, variable in zip(gradients, model.trainable_variables, strict=True)
                ]
                parts.append(whole)
                after.append([keras.ops.convert_to_numpy(one).copy() for one in moments])
            means = [tree([*each]) / np.float32(VIRTUAL_SIZE) for each in zip(*parts, strict=True)]
            for moment, values in zip(moments, zip(*after, strict=True), strict=True):
                moment.assign(tree([*values]) / np.float32(VIRTUAL_SIZE))
            tensors = [keras.ops.convert_to_tensor(mean) for mean in means]
            optimizer.apply(tensors, model.trainable_variables)
            losses.append(float(tree(of_step) / VIRTUAL_SIZE))
            found.append(digest(model, optimizer, losses))
    return found


@functools.cache
def expected(backend: str) -> dict[str, list[str]]:
    (result,) = run_world(1, hashes_alone, env=environment(backend))
    assert (
        len({one for each in result.value.values() for one in each}) == len(KINDS) * EPOCHS * STEPS
    )
    return dict(result.value)


@pytest.mark.parametrize(
    ("backend", "hosts"),
    [
        ("tensorflow", [0]),
        ("tensorflow", [0, 0, 0]),
        ("tensorflow", [0, 0, 1, 1]),
        ("torch", [0]),
        ("torch", [0, 1]),
        ("torch", [0, 0, 0]),
        ("torch", [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_every_number_of_ranks_has_the_bits_of_plain_keras(backend: str, hosts: list[int]) -> None:
    for result in run_world(len(hosts), hashes, hosts=hosts, env=environment(backend)):
        assert result.value == expected(backend)


def train_on(path: str, stop: int) -> list[str]:
    """Go on where the checkpoint is, if there is one, up to a step, and save the next one."""
    begin()
    model, optimizer, data = transformer()
    optimizer.build(model.trainable_variables)
    file = Path(path)
    losses: list[Any] = []
    if file.exists():
        losses, values = pickle.loads(file.read_bytes())
        for variable, value in zip([*model.variables, *optimizer.variables], values, strict=True):
            variable.assign(value)
    found = train(model, optimizer, data, losses, stop)
    values = [keras.ops.convert_to_numpy(v) for v in [*model.variables, *optimizer.variables]]
    if hvd.rank() == 0:
        file.write_bytes(pickle.dumps((losses, values)))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_goes_on_with_other_ranks(backend: str, tmp_path: Path) -> None:
    found = []
    for ranks, stop in ((2, 1), (1, 3), (3, 4)):
        *_, last = run_world(
            ranks, train_on, str(tmp_path / "state"), stop, env=environment(backend)
        )
        found += last.value
    assert found == expected(backend)["transformer"]


def of_two_ranks() -> None:
    begin()
    with pytest.raises(hvd.MismatchError, match="first step is"):
        next(small(done=hvd.rank())[1])
    with pytest.raises(hvd.MismatchError, match="seed is"):
        next(small(seed=hvd.rank())[1])
    if hvd.rank() == 1:
        hvd.join()
        return
    _, steps = small()
    with pytest.raises(hvd.HvdliteError, match=r"of 2 of 4 virtual ranks .* called hvd\.join\(\)"):
        next(steps).gradients(lambda *_: (None, [None, None]))
    hvd.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_differ_and_that_have_joined_are_named(backend: str) -> None:
    run_world(2, of_two_ranks, env=environment(backend))


def small(epoch: int = 0, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """Make a model of one layer, and the steps of its loop."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    images, targets = image_data()
    data = images.reshape(-1, 64), targets
    batches = hvd.VirtualBatches(*data, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=seed)
    return model, hvd.virtual_steps(batches, epoch, model, **options)


def scenario_arguments_that_cannot_be_used() -> None:
    for options in ({"threads": 0}, {"done": -1}, {"epoch": True}):
        with pytest.raises(hvd.ArgumentError, match=f"{next(iter(options))}=.*whole number"):
            small(**options)
    with pytest.raises(hvd.ArgumentError, match="same length"):
        hvd.VirtualBatches(np.ones(4), np.ones(5), batch_size=1, virtual_size=2)
    with pytest.raises(hvd.ArgumentError, match="there are 4; use a smaller"):
        hvd.VirtualBatches(np.ones(4), batch_size=1, virtual_size=8)
    batches = hvd.VirtualBatches(np.ones(8), batch_size=1, virtual_size=8)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(hvd.ArgumentError, match="built model"):
        hvd.virtual_steps(batches, 0, unbuilt)
    with pytest.raises(hvd.ArgumentError, match=r"takes hvd\.VirtualBatches"):
        hvd.virtual_steps([1], 0, unbuilt)
    half = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float16")])
    with pytest.raises(hvd.ArgumentError, match="gradients of float16"):
        hvd.virtual_steps(batches, 0, half)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvdlite.basics.in_elastic_job", lambda: True)
        with pytest.raises(hvd.ArgumentError, match="in an elastic job"):
            small()


def scenario_what_the_function_returns_is_checked() -> None:
    for result, message in (
        (None, "returns two values"),
        ((1.0, []), "of which there are 2"),
        ((1.0, [np.ones(3, "float32"), None]), r"gives a gradient of float32 \(3,\)"),
        ((1.0, [np.ones((64, 10)), None]), "gives a gradient of float64"),
    ):
        _, steps = small()
        with pytest.raises(hvd.ArgumentError, match=message):
            next(steps).gradients(lambda *_, result=result: result)
        steps.close()


def scenario_a_step_is_done_once() -> None:
    _, steps = small()
    step = next(steps)
    assert step.gradients(lambda *_: (None, [None, None])) == [None, None]
    assert step.loss is None
    with pytest.raises(hvd.HvdliteError, match="once in each step"):
        step.gradients(lambda *_: (None, [None, None]))
    next(steps)
    with pytest.raises(hvd.HvdliteError, match="was left before its end"):
        next(steps)


def scenario_a_training_goes_on_after_the_steps_that_are_done() -> None:
    for done, left in ((0, [0, 1, 0, 1]), (1, [1, 0, 1]), (2, [0, 1]), (3, [1]), (4, [])):
        numbers = []
        for epoch in range(EPOCHS):
            for step in small(epoch, done=done)[1]:
                step.gradients(lambda *_: (None, [None, None]))
                numbers.append(step.number)
        assert numbers == left


def scenario_a_step_that_failed_begins_anew() -> None:
    model, optimizer, data = network()
    batches = hvd.VirtualBatches(*data, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=SEED)
    compute = gradients_of(model)
    calls = iter(range(10**6))

    def fails_once(*batch: Any) -> Any:
        result = compute(*batch)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return result

    before = [keras.ops.convert_to_numpy(one) for one in model.non_trainable_weights]
    step = next(hvd.virtual_steps(batches, 0, model))
    with pytest.raises(KeyboardInterrupt):
        step.gradients(fails_once)
    after = [keras.ops.convert_to_numpy(one) for one in model.non_trainable_weights]
    assert before and all(map(np.array_equal, before, after))
    optimizer.apply(step.gradients(fails_once), model.trainable_variables)
    found = digest(model, optimizer, [step.loss])
    assert found == train(*network())[0]


def scenario_a_distributed_optimizer_is_refused() -> None:
    model, steps = small()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    gradients = next(steps).gradients(gradients_of(model, compiled=False))
    with pytest.raises(hvd.ArgumentError, match="the plain optimizer"):
        optimizer.apply(gradients, model.trainable_variables)
    steps.close()
    optimizer.apply([one * 0 for one in model.trainable_variables], model.trainable_variables)


def scenario_a_collective_in_the_function_is_refused() -> None:
    model, _ = small()
    own = gradients_of(model, compiled=False)

    def reduces(*batch: Any) -> Any:
        loss, gradients = own(*batch)
        return loss, [None if one is None else hvd.allreduce(one) for one in gradients]

    def reduces_in_a_graph(inputs: Any, targets: Any) -> Any:
        import tensorflow as tf

        from hvdlite.tensorflow import DistributedGradientTape

        with DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(model(inputs, training=True) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    functions = [reduces]
    if on_tensorflow():
        import tensorflow as tf

        functions.append(tf.function(reduces_in_a_graph))
    for function in functions:
        _, steps = small()
        with pytest.raises(hvd.HvdliteError, match="has called a collective"):
            next(steps).gradients(function)
        steps.close()


def scenario_other_threads_are_noticed() -> None:
    if on_tensorflow():
        return
    import torch

    model, steps = small()
    next(steps).gradients(gradients_of(model))
    torch.set_num_threads(2)
    with pytest.raises(hvd.HvdliteError, match="torch has 2 threads on rank 0"):
        next(steps).gradients(gradients_of(model))
    steps.close()


def scenario_tensorflow_needs_its_threads_and_no_layer_that_waits() -> None:
    if not on_tensorflow():
        return
    from hvdlite.tensorflow import SyncBatchNormalization

    with pytest.raises(hvd.ArgumentError, match=r"set_intra_op_parallelism_threads\(2\)"):
        small(threads=2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), SyncBatchNormalization()])
    batches = hvd.VirtualBatches(np.ones(8), batch_size=1, virtual_size=8)
    with pytest.raises(hvd.ArgumentError, match="whose moments"):
        hvd.virtual_steps(batches, 0, model)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_scenario = make_tests(body, on_backends((1, "tensorflow"), (1, "torch")))
