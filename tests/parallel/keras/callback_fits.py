"""Calls of fit() with callbacks, and callbacks that record values."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from hvdlite import stop
from parallel.keras.keras_worlds import (
    data,
    dense_model,
    hvd,
    keras,
    mine,
    on_every_rank,
    same_bits,
    weights_of,
)


def compiled(optimizer: Any, built: bool = True, alike: bool = False, **how: Any) -> Any:
    """Make a model with different weights on every rank, unless they are to be alike."""
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


def stop_in_fit(fit: Any, weights: Any) -> None:
    """The last rank gets a signal in a batch; all ranks save after that batch, and end.

    Args:
        fit: calls `fit` with the callbacks that it is given, for more than four batches.
        weights: returns the weights of the model.
    """
    saved: list[Any] = []
    begun: list[int] = []

    def begin(batch: int, logs: Any = None) -> None:
        begun.append(batch)
        if len(begun) == 4 and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    callback = hvd.callbacks.StopCallback(lambda: saved.append((len(begun), weights())))
    try:
        fit(begin, callback)
        raise AssertionError("fit() did not end")
    except SystemExit as end:
        assert end.code == hvd.EXIT_STOPPED == 75
    stop._noted.clear()
    [(batches, values)] = saved
    assert all(np.array_equal(a, b) for a, b in zip(values, weights(), strict=True))
    assert same_bits(values)
    assert on_every_rank((batches, begun)) == [(4, begun)] * hvd.size()


def in_test(on_batch: Any = None, on_end: Any = None) -> Any:
    """Make a callback that calls functions in `evaluate`, where `LambdaCallback` has no hooks."""

    class InTest(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if on_batch is not None:
                on_batch()

        def on_test_end(self, logs: Any = None) -> None:
            if on_end is not None:
                on_end(logs)

    return InTest()


class Probe:
    """Records the result of a function in each call of a hook."""

    def __init__(self, hook: str, look: Any) -> None:
        self.seen: list[Any] = []
        self.callback = keras.callbacks.LambdaCallback(
            **{hook: lambda *_, **__: self.seen.append(look())}
        )
