"""In fit, dead ranks, ranks that run out of batches, and different models are clear errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from parallel.deaths import die, seconds_since_death
from parallel.keras.keras_worlds import (
    BACKENDS,
    KERAS_2,
    and_legacy,
    data,
    dense_model,
    environment,
    hvd,
    keras,
    sgd,
    start,
    world,
)

PRELOAD = ("keras", "tensorflow")
BOUND = 1.0  # seconds from the death to the error


def compiled(**how: Any) -> Any:
    return compile_model(dense_model(), **how)


def compile_model(model: Any, **how: Any) -> Any:
    """Compile it, in Keras 2 with an optimizer of the older family."""
    make = and_legacy(sgd)[-1]
    model.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse", **how)
    return model


def outcome_of(model: Any, *arguments: Any, **how: Any) -> dict[str, Any]:
    try:
        model.fit(*arguments, batch_size=4, verbose=0, **how)
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none"}


def killed(victim: int, noted: str) -> dict[str, Any]:
    start()

    def end(batch: int, logs: Any) -> None:
        if batch == 20 and hvd.rank() == victim:
            time.sleep(0.2)  # the others wait inside a collective
            die(noted)

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=end)
    outcome = outcome_of(compiled(), *data(4 * 1000), epochs=100, callbacks=[callback])
    return {**outcome, "late": seconds_since_death(noted)}


@pytest.mark.parametrize(
    ("backend", "victim"), [("torch", 0), pytest.param(KERAS_2, 1, marks=pytest.mark.long)]
)
def test_killed_rank_is_named_by_every_survivor(backend: str, victim: int, tmp_path: Path) -> None:
    noted = tmp_path / "died"
    how = world(2, backend)
    results = run_world(body=killed, args=(victim, str(noted)), expect_failure=True, **how)
    assert results[victim].returncode == -9
    survivor = results[1 - victim]
    assert survivor.returncode == 0, survivor.stderr
    error = survivor.value
    assert error["kind"] in ("AbortedError", "RankFailedError"), error
    assert f"rank {victim} died" in error["message"]
    assert error["late"] <= BOUND


def goes_on_from_a_backup(folder: str, noted: str, dies: bool) -> dict[str, Any]:
    start()
    alone, model = dense_model(), hvd.distribute(dense_model())
    for one in (alone, model):
        one.compile(keras.optimizers.Adam(0.01), "mse")

    def end(epoch: int, logs: Any) -> None:
        if dies and epoch == 2 and hvd.rank() == 1:
            die(noted)

    how = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}
    callbacks = [keras.callbacks.BackupAndRestore(folder)]
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=end))
    try:
        history = model.fit(*data(17), callbacks=callbacks, **how).history
    except Exception as error:
        return {"message": str(error)}
    alone.fit(*data(17), **how)
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    return {"epochs": len(history["loss"]), "same": all(np.allclose(*pair) for pair in pairs)}


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_distributed_job_goes_on_from_a_backup_on_fewer_ranks(backend: str, tmp_path: Path) -> None:
    files, env = (str(tmp_path / "backup"), str(tmp_path / "died")), environment(backend)
    first = run_world(3, goes_on_from_a_backup, *files, True, env=env, expect_failure=True)
    for rank in (0, 2):
        assert "rank 1 died" in first[rank].value["message"]
    second = run_world(2, goes_on_from_a_backup, *files, False, env=env)
    assert [rank.value for rank in second] == [{"epochs": 2, "same": True}] * 2


def runs_out(leaver: int) -> dict[str, Any]:
    """One rank has one batch less, no callback compares beforehand, and it leaves."""
    start()
    outcome = outcome_of(compiled(), *data(20 - 4 * (hvd.rank() == leaver)))
    hvd.shutdown()
    return outcome


def test_rank_that_ran_out_of_batches_is_named() -> None:
    leaver = 0
    results = run_world(2, runs_out, leaver, env=environment("tensorflow"))
    assert results[leaver].value["kind"] == "none"
    message = results[1 - leaver].value["message"]
    assert f"rank {leaver} left after" in message and "'keras.0." in message
    assert "give every rank the same number of steps" in message


def runs_out_of_unknown_batches() -> dict[str, Any]:
    start()
    inputs, targets = data(4)

    def batches() -> Any:
        for _ in range(5 - hvd.rank()):
            yield inputs, targets

    callbacks = [hvd.callbacks.MetricAverageCallback()]
    try:
        compiled().fit(batches(), shuffle=False, verbose=0, callbacks=callbacks)
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_whose_epoch_ends_early_says_so(backend: str) -> None:
    """If the number of batches is not known beforehand, the ranks get the error in the middle."""
    first, second = run_world(2, runs_out_of_unknown_batches, env=environment(backend))
    assert second.value["kind"] == "ArgumentError"
    assert "the epoch of rank 1 ended after 4 batches" in second.value["message"]
    # The mismatch itself, or the error that rank 1 has left since.
    assert "'keras.0." in first.value["message"]
    assert "rank 1" in first.value["message"]


def disagrees() -> dict[str, Any]:
    start()
    keras.utils.set_random_seed(1)
    width = 3 + hvd.rank()
    layers = [keras.Input((5,)), keras.layers.Dense(width), keras.layers.Dense(1)]
    model = compile_model(keras.Sequential(layers))
    fitted = outcome_of(model, *data(8))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return {"fit": fitted, "broadcast": outcome_of(model, *data(8), callbacks=[callback])}


@pytest.mark.long
@pytest.mark.parametrize("backend", ("torch", KERAS_2))
def test_models_that_differ_are_an_error_on_every_rank(backend: str) -> None:
    for result in run_world(body=disagrees, **world(2, backend)):
        fitted, broadcast = result.value["fit"], result.value["broadcast"]
        assert "'keras.0." in fitted["message"], fitted
        assert broadcast["kind"] == "MismatchError"
        assert "kernel" in broadcast["message"]
        for message in (fitted["message"], broadcast["message"]):
            assert "rank 0" in message and "rank 1" in message


def catches_an_error_while_a_batch_is_loaded() -> dict[str, Any]:
    class SlowBatches(keras.utils.PyDataset):  # type: ignore[misc]
        """Batches of which the third and later ones take a moment to load."""

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            if index >= 2:
                time.sleep(1.0)
            return data(4)

    start()

    def fail(batch: int, logs: Any) -> None:
        if batch == 1:
            raise hvd.HvdliteError("a step failed")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    return outcome_of(compiled(), SlowBatches(), callbacks=[callback])


@pytest.mark.long
def test_process_ends_although_a_batch_is_being_loaded() -> None:
    """Without a collection at exit TensorFlow waits for ever for the thread that loads it."""
    (only,) = run_world(1, catches_an_error_while_a_batch_is_loaded, env=environment("tensorflow"))
    assert only.value["message"] == "a step failed"
