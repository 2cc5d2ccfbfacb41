"""In fit of Keras 2 (tf_keras), dead ranks and different models are clear errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import run_world
from parallel.deaths import die, seconds_since_death
from parallel.keras.keras_worlds import (
    data,
    environment,
    hvd,
    start,
)
from parallel.keras.tf_keras_worlds import (
    dense_model,
    k2,
    legacy_adam,
    sgd,
)

pytestmark = pytest.mark.long

PRELOAD = ("tf_keras",)
BOUND = 1.0  # seconds from the death to the error


def outcome_of_fit(model: Any, *arguments: Any, **how: Any) -> dict[str, Any]:
    try:
        model.fit(*arguments, batch_size=4, verbose=0, **how)
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none"}


def killed(family: str, noted: str) -> dict[str, Any]:
    start()

    def end(batch: int, logs: Any) -> None:
        if batch == 20 and hvd.rank() == 1:
            time.sleep(0.2)  # the others wait inside a collective
            die(noted)

    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(makers()[family]()), loss="mse")
    callback = k2.callbacks.LambdaCallback(on_batch_begin=end)
    outcome = outcome_of_fit(model, *data(4 * 1000), epochs=100, callbacks=[callback])
    return {**outcome, "late": seconds_since_death(noted)}


def makers() -> dict[str, Callable[[], Any]]:
    return {"new": sgd, "legacy": legacy_adam}


@pytest.mark.parametrize("family", ["new", "legacy"])
def test_killed_rank_is_named_by_the_survivor(family: str, tmp_path: Path) -> None:
    noted = tmp_path / "died"
    results = run_world(
        2, killed, family, str(noted), env=environment("tensorflow"),
        expect_failure=True,
    )  # fmt: skip
    assert results[1].returncode == -9
    survivor = results[0]
    assert survivor.returncode == 0, survivor.stderr
    assert survivor.value["kind"] == "AbortedError", survivor.value
    assert "rank 1 died" in survivor.value["message"]
    assert survivor.value["late"] <= BOUND


def disagrees() -> dict[str, Any]:
    start()
    width = 3 + hvd.rank()
    outcomes = {}
    for family, make in makers().items():
        model = k2.Sequential([k2.Input((5,)), k2.layers.Dense(width), k2.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse")
        outcomes[family] = outcome_of_fit(model, *data(8))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    outcomes["broadcast"] = outcome_of_fit(model, *data(8), callbacks=[callback])
    return outcomes


def test_models_that_differ_are_an_error_on_every_rank() -> None:
    for result in run_world(2, disagrees, env=environment("tensorflow")):
        for family, outcome in result.value.items():
            assert outcome["kind"] != "none", family
            assert "rank 0" in outcome["message"] and "rank 1" in outcome["message"], outcome
            assert ("kernel" if family == "broadcast" else "'keras.") in outcome["message"]
