"""HVDLITE_CHECK_REPLICAS in `fit`, with no callback of its own; and what `fit` observes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.live import observed
from parallel.keras.callback_fits import compiled, fit
from parallel.keras.keras_worlds import (
    KERAS_2,
    array_of,
    hvd,
    keras,
    run_scenarios,
    world,
)
from parallel.scenarios import make_tests

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")


def callbacks() -> list[Any]:
    return [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ]


def disturb(model: Any, rank: int, at: int) -> Any:
    """Make a callback that changes the first variable of one rank after so many batches."""
    seen: list[int] = []

    def change(batch: int, logs: Any = None) -> None:
        seen.append(batch)
        if len(seen) == at and hvd.rank() == rank:
            variable = model.trainable_variables[0]
            variable.assign(array_of(variable) * np.float32(1.5))

    return keras.callbacks.LambdaCallback(on_train_batch_end=change)


def scenario_names_the_variable_and_the_batch() -> None:
    """The last rank diverges after batch 4, and fit() names it in batch 6."""
    model, last = compiled(keras.optimizers.Adam(0.01)), hvd.size() - 1
    with pytest.raises(hvd.DivergenceError, match=r"_REPLICAS, batch 6 of fit\(\)") as caught:
        fit(model, [*callbacks(), disturb(model, last, 4)], samples=16)
    first = model.trainable_variables[0]
    assert getattr(first, "path", first.name) in caught.value.tensors
    assert caught.value.ranks == ((last,) if hvd.size() > 2 else ())


def scenario_equal_replicas_pass_also_if_the_first_batch_builds_them() -> None:
    for built in (True, False):
        fit(compiled(keras.optimizers.Adam(0.01), built=built), callbacks(), samples=40)


def scenario_models_that_train_alone_are_not_compared() -> None:
    model = compiled(keras.optimizers.SGD(0.05))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    fit(model, [hvd.callbacks.LocalSGDCallback(every=5), *callbacks()], samples=40)


def scenario_observes_samples_and_logs() -> None:
    observed.forget()
    model = compiled(keras.optimizers.SGD(0.05), alike=True, metrics=["mae"])
    inputs = np.ones((7, 5), "float32")
    fit(model, callbacks(), samples=10, validation_data=(inputs, inputs[:, :1]))
    figures = observed.figures()
    assert figures["samples"] == 2 * 10
    assert set(figures["values"]) == {"loss", "mae", "val_loss", "val_mae"}
    fit(model, callbacks()[:1], samples=6, epochs=1)
    assert observed.figures()["samples"] == 2 * 10 + 6
    hvd.observe(samples=3, loss=9.0)
    assert observed.figures()["samples"] == 3
    assert observed.figures()["values"]["loss"] == 9.0
    observed.forget()


def scenario_a_history_that_is_used_again_is_observed_once() -> None:
    observed.forget()
    model = compiled(keras.optimizers.SGD(0.05), alike=True)
    history = keras.callbacks.History()
    for _ in range(2):
        fit(model, [*callbacks(), history], samples=6, epochs=1)
        assert not vars(history).keys() & {"on_train_batch_end", "on_train_end"}
    assert observed.figures()["samples"] == 2 * 6


def body() -> dict[str, str]:
    return run_scenarios(globals())


WORLDS = {f"{n}-{backend}": world(n, backend) for n, backend in ((2, KERAS_2), (3, "torch"))}
for one in WORLDS.values():
    one["env"]["HVDLITE_CHECK_REPLICAS"] = "3"
test_replica_check = make_tests(body, WORLDS)
