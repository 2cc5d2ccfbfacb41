"""Calls of fit() with callbacks, and what looks into them."""

from __future__ import annotations

from typing import Any

from parallel.keras.keras_worlds import (
    data,
    dense_model,
    hvd,
    keras,
    mine,
    weights_of,
)


def array(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)


def compiled(optimizer: Any, built: bool = True, alike: bool = False, **how: Any) -> Any:
    """Make a model that has other weights on every rank, unless they are to be alike."""
    model = dense_model(built=built)
    if built and not alike:
        model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
    elif not built:
        keras.utils.set_random_seed(20 + hvd.rank())  # Layers draw their seeds when they are made.
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse", **how)
    return model


def fit(model: Any, callbacks: list[Any], samples: int = 12, **how: Any) -> Any:
    how = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **how}
    inputs, targets = data(samples * hvd.size())
    return model.fit(mine(inputs), mine(targets), callbacks=callbacks, **how).history


class InTest(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls functions in `evaluate`, where `LambdaCallback` has no hooks."""

    def __init__(self, batch: Any = None, end: Any = None) -> None:
        super().__init__()
        self._batch, self._end = batch, end

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._batch is not None:
            self._batch()

    def on_test_end(self, logs: Any = None) -> None:
        if self._end is not None:
            self._end(logs)


class Probe:
    """Notes what a function says in each call of some hook."""

    def __init__(self, hook: str, look: Any) -> None:
        self.seen: list[Any] = []
        self.callback = keras.callbacks.LambdaCallback(
            **{hook: lambda *_, **__: self.seen.append(look())}
        )
