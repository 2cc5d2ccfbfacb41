"""Worlds of Keras 2, the package tf_keras: loaded by the ranks only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parallel.keras.keras_worlds import data, hvd, mine, same_bits
from parallel.scenarios import Later, tensors_sent_by

BATCH = 4
BATCHES = 3
EPOCHS = 2

k2: Any = Later("tf_keras")


def dense_model(dtype: str | None = None) -> Any:
    """Make a model of four variables, with the same weights on every rank."""
    k2.utils.set_random_seed(11)
    layers = [k2.layers.Dense(4, "tanh", dtype=dtype), k2.layers.Dense(1, dtype=dtype)]
    return k2.Sequential([k2.Input((5,)), *layers])


def weights_of(model: Any) -> list[Any]:
    return [weight.numpy() for weight in model.weights]


def close(ours: list[Any], theirs: list[Any], tolerance: float = 1e-6) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(np.allclose(a, b, atol=tolerance) for a, b in pairs)


def sgd() -> Any:
    return k2.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return k2.optimizers.Adam(0.01, global_clipnorm=0.5)


def legacy_sgd() -> Any:
    return k2.optimizers.legacy.SGD(0.05, momentum=0.9)


def legacy_adam() -> Any:
    return k2.optimizers.legacy.Adam(0.01, clipvalue=0.1)


def fit_on_all_ranks_and_alone(
    make: Callable[[], Any], passes: int = 1, average: bool = True, **how: Any
) -> None:
    """Every gradient is reduced once per update; the result is that of one process."""
    model = dense_model()
    wrapped = make()
    optimizer = hvd.DistributedOptimizer(
        wrapped, backward_passes_per_step=passes, average_aggregated_gradients=average
    )
    assert optimizer is wrapped
    model.compile(optimizer=optimizer, loss="mse", **how)
    whole = BATCH * passes * hvd.size()
    inputs, targets = data(whole * BATCHES)
    common = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    count = tensors_sent_by(
        lambda: model.fit(mine(inputs), mine(targets), batch_size=BATCH, **common)
    )
    assert count == EPOCHS * BATCHES * len(model.trainable_variables)
    assert int(optimizer.iterations) == EPOCHS * BATCHES
    assert same_bits(weights_of(model))
    if hvd.rank() == 0:
        alone = dense_model()
        alone.compile(optimizer=make(), loss="mse", loss_weights=None if average else float(passes))
        alone.fit(inputs, targets, batch_size=whole, **common)
        assert close(weights_of(model), weights_of(alone))
