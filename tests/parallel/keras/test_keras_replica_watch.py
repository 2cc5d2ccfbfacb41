"""The callback that compares the variables of all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from parallel.keras.callback_fits import compiled, fit
from parallel.keras.keras_worlds import (
    hvd,
    keras,
    on_backends,
    run_scenarios,
    same_bits,
    weights_of,
)
from parallel.scenarios import make_tests

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")


def disturb(model: Any, rank: int, at: int, lambdas: Any = None) -> Any:
    """Make a callback that changes the first variable of one rank after so many batches."""
    seen: list[int] = []

    def change(batch: int, logs: Any = None) -> None:
        seen.append(batch)
        if len(seen) == at and hvd.rank() == rank:
            variable = model.trainable_variables[0]
            variable.assign(keras.ops.convert_to_numpy(variable) * np.float32(1.5))

    return (lambdas or keras.callbacks.LambdaCallback)(on_train_batch_end=change)


def scenario_the_callback_names_the_variable() -> None:
    model = compiled(keras.optimizers.Adam(0.01), alike=True)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.ReplicaWatchCallback(every=2),
        disturb(model, hvd.size() - 1, at=3),
    ]
    with pytest.raises(hvd.DivergenceError, match="ReplicaWatchCallback, batch 4") as caught:
        fit(model, callbacks)
    assert model.trainable_variables[0].path in caught.value.tensors
    assert caught.value.ranks == ((hvd.size() - 1,) if hvd.size() > 2 else ())


def scenario_equal_models_pass() -> None:
    model = compiled(keras.optimizers.Adam(0.01), alike=True)
    fit(model, [hvd.callbacks.ReplicaWatchCallback(every=1)])


def scenario_the_callback_repairs() -> None:
    if hvd.size() == 2:
        return
    model = compiled(keras.optimizers.Adam(0.01), alike=True)
    watch = hvd.callbacks.ReplicaWatchCallback(every=2, then="repair")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, [watch, disturb(model, 0, at=3)])
    ours = [one for one in caught if one.category is hvd.ReplicasDifferWarning]
    assert len(ours) == (hvd.rank() == 0), [str(one.message) for one in caught]
    assert same_bits(weights_of(model))


def scenario_bad_arguments() -> None:
    with pytest.raises(hvd.ArgumentError, match="then='stop'"):
        hvd.callbacks.ReplicaWatchCallback(then="stop")


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_replica_watch = make_tests(body, on_backends((2, "tensorflow"), (3, "torch")))
