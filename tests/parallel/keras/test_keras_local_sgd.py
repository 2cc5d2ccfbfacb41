"""LocalSGDCallback: ranks fit on their own, and average from time to time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parallel.keras.keras_worlds import (
    KERAS_2,
    data,
    dense_model,
    hvd,
    keras,
    on_backends,
    on_every_rank,
    run_scenarios,
    same_bits,
    weights_of,
)
from parallel.scenarios import make_tests

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")


def batches_of(rank: int, size: int) -> tuple[Any, Any]:
    inputs, targets = data(24 * size)
    return inputs[rank::size], targets[rank::size]


def fitted(rank: int, callbacks: list[Any], epochs: int = 1, **how: Any) -> Any:
    model = dense_model()
    if callbacks:
        model.set_weights([weight + rank for weight in weights_of(model)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    model.fit(*batches_of(rank, hvd.size()), batch_size=4, epochs=epochs, shuffle=False,
              verbose=0, callbacks=callbacks, **how)  # fmt: skip
    return model


def scenario_equals_an_average_of_each_ranks_model() -> None:
    """Six batches without a round before the end: the average of models trained on their own."""
    everyone = on_every_rank(weights_of(fitted(hvd.rank(), [])))
    model = fitted(hvd.rank(), [hvd.callbacks.LocalSGDCallback(every=100)])
    for ours, *theirs in zip(weights_of(model), *everyone, strict=True):
        assert np.allclose(ours, np.mean(theirs, axis=0), atol=1e-6)
    assert same_bits(weights_of(model))


def scenario_outer_momentum_and_validation() -> None:
    callback = hvd.callbacks.LocalSGDCallback(every=4, outer_lr=0.7, outer_momentum=0.5)
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(same_bits(
        weights_of(look.model))))  # fmt: skip
    average = hvd.callbacks.MetricAverageCallback()
    model = fitted(
        hvd.rank(), [callback, average, look], epochs=3, validation_data=batches_of(0, 1)
    )
    assert seen == [True] * 3
    assert all(np.isfinite(weight).all() for weight in weights_of(model))


def scenario_ranks_stop_together_after_a_round() -> None:
    last, seen = hvd.size() - 1, []

    def stop(batch: int, logs: Any = None) -> None:
        seen.append(batch)
        watch.model.stop_training |= hvd.rank() == last and len(seen) == 2

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model = fitted(hvd.rank(), [hvd.callbacks.LocalSGDCallback(every=4), watch], epochs=2)
    assert len(seen) == 4
    assert same_bits(weights_of(model))


def scenario_what_cannot_be_used() -> None:
    with pytest.raises(hvd.ArgumentError, match="every is 1 or more"):
        hvd.callbacks.LocalSGDCallback(every=0)
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    with pytest.raises(hvd.ArgumentError, match="takes a plain optimizer"):
        model.fit(*data(8), verbose=0, callbacks=[hvd.callbacks.LocalSGDCallback()])
    model = dense_model(built=False)
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    callback = hvd.callbacks.LocalSGDCallback()
    callback.set_model(model)
    callback.on_train_begin()
    with pytest.raises(hvd.ArgumentError, match="needs a built model"):
        callback.on_train_batch_begin(0)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_local_sgd = make_tests(body, on_backends((2, "torch"), (2, KERAS_2)))
