"""Keras with parameter servers: an optimizer that pushes and pulls, on both backends."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

from parallel.keras.keras_worlds import (
    BACKENDS,
    data,
    dense_model,
    hvd,
    keras,
    on_backends,
    on_tensorflow,
    run_scenarios,
    weights_of,
)
from parallel.scenarios import make_tests
from parameter_servers import Servers

PRELOAD = ("keras", "tensorflow")


def served(make_optimizer: Any) -> Servers:
    """Start servers as threads of this process."""
    from hvdlite.keras.parameter_server import KerasStorage

    return Servers(2, lambda tensors: KerasStorage(make_optimizer, tensors))


def remote(servers: Servers, **options: Any) -> Any:
    return hvd.parameter_server.RemoteOptimizer(servers.client(), **options)


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def fitted(optimizer: Any, epochs: int = 2, **how: Any) -> Any:
    model = dense_model()
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, **how)
    model.fit(*data(), batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


def scenario_one_worker_has_the_weights_of_plain_training() -> None:
    for make in (momentum, lambda: keras.optimizers.Adam(0.01)):
        with served(make) as servers:
            model = fitted(remote(servers))
            assert (model.optimizer.clock, int(model.optimizer.iterations)) == (12, 12)
        for ours, plain in zip(weights_of(model), weights_of(fitted(make())), strict=True):
            assert np.allclose(ours, plain, atol=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        again = keras.models.load_model(f"{folder}/model.keras", compile=False)
        assert np.array_equal(weights_of(again)[0], weights_of(model)[0])


def scenario_other_servers_go_on_from_the_state_of_these() -> None:
    """Values and the optimizer's state travel in slots, as in a checkpoint."""
    from hvdlite.keras.parameter_server import KerasStorage
    from hvdlite.parameter_server.tensors import Gradient, Slot, TensorSpec

    tensors = [TensorSpec("kernel", "float32", (3, 2))]
    gradient = Gradient(0, memoryview(np.full((3, 2), 0.5, "float32")).cast("B"))
    rows = Gradient(
        0, memoryview(np.ones((1, 2), "float32")).cast("B"), memoryview(np.array([2])).cast("B")
    )
    first, second = (KerasStorage(lambda: keras.optimizers.Adam(0.1), tensors) for _ in range(2))
    first.apply([gradient])
    for slot in first.slots():
        second.restore(slot)
    read = []
    for storage in (first, second):
        storage.apply([rows])
        memory = bytearray(24)
        storage.read(0, memoryview(memory))
        read.append(bytes(memory))
    assert read[0] == read[1]
    with pytest.raises(hvd.ArgumentError, match="the optimizer has none: use the optimizer that"):
        second.restore(Slot(0, "9.other", "float32", (3, 2), memoryview(bytearray(24))))
    elsewhere = Gradient(0, rows.values, memoryview(np.array([3])).cast("B"))
    with pytest.raises(hvd.ArgumentError, match="rows of 'kernel' must be from 0 to 2"):
        first.apply([elsewhere])


def scenario_a_server_does_not_clip_by_the_norm_of_all_tensors() -> None:
    from hvdlite.keras.parameter_server import KerasStorage
    from hvdlite.parameter_server.tensors import TensorSpec

    tensors = [TensorSpec("w", "float32", (4, 2))]
    KerasStorage(lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), tensors)
    with pytest.raises(hvd.ArgumentError, match="clip on the workers, by group.optimizer"):
        KerasStorage(lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), tensors)


def scenario_workers_clip_as_a_plain_optimizer_does() -> None:
    for bound in ({"clipvalue": 0.01}, {"clipnorm": 0.05}, {"global_clipnorm": 0.05}):
        with served(momentum) as servers:
            model = fitted(remote(servers, **bound))
        plain = fitted(keras.optimizers.SGD(0.05, momentum=0.9, **bound))
        for ours, theirs in zip(weights_of(model), weights_of(plain), strict=True):
            assert np.allclose(ours, theirs, atol=1e-6)


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return keras.ops.mean(keras.ops.square(keras.ops.subtract(model(inputs), targets)))


def step(model: Any, optimizer: Any, inputs: Any, targets: Any) -> None:
    """Take a step of a loop of one's own."""
    variables = model.trainable_variables
    if on_tensorflow():
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs, targets)
        gradients = tape.gradient(loss, [one.value for one in variables])
    else:
        model.zero_grad()
        loss_of(model, inputs, targets).backward()
        gradients = [one.value.grad for one in variables]
    optimizer.apply(gradients, variables)


def scenario_push_and_pull_now_and_then() -> None:
    with served(lambda: keras.optimizers.SGD(0.05)) as servers:
        optimizer = remote(servers, push_every=3, pull_every=2)
        model = dense_model()
        before = weights_of(model)
        inputs, targets = data()
        step(model, optimizer, inputs, targets)
        assert all(np.array_equal(a, b) for a, b in zip(weights_of(model), before, strict=True))
        for _ in range(3):
            step(model, optimizer, inputs, targets)
        worker = optimizer._client.report().servers[0].workers[2]
        assert (worker.clock, worker.pulls) == (4, 3)  # The first one came with build().
        assert not np.array_equal(weights_of(model)[0], before[0])


def scenario_what_cannot_be_meant() -> None:
    with served(momentum) as servers:
        with pytest.raises(hvd.ArgumentError, match="staleness=-1 is not None, 0 or a number"):
            remote(servers, staleness=-1)
        with pytest.raises(hvd.ArgumentError, match="push_every=0 is not a number of steps"):
            remote(servers, push_every=0)
        optimizer = remote(servers)
        with pytest.raises(hvd.ArgumentError, match="a worker cannot set the learning rate"):
            optimizer.learning_rate = 0.1
        if on_tensorflow():
            model = dense_model()
            model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
            with pytest.raises(hvd.ArgumentError, match="give compile\\(\\) jit_compile=False"):
                model.fit(*data(), verbose=0)
    with served(lambda: "sgd") as servers:
        model = dense_model()
        with pytest.raises(hvd.ArgumentError, match="takes a function that returns a new optim"):
            remote(servers).build(model.trainable_variables)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_parameter_server = make_tests(body, on_backends(*((1, backend) for backend in BACKENDS)))
