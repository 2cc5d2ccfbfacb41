"""`hvd.Shards` distributes arrays to the ranks of `fit`, which resumes with any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import run_world
from parallel.keras.keras_worlds import BACKENDS, environment, hvd, keras, start

PRELOAD = ("keras", "tensorflow")
SAMPLES = 46
BATCH = 4
STOPPED_AFTER = 3  # batches of epoch 1


class Fit:
    """Trains on shards, and notes the samples of each batch."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        numbers = np.arange(SAMPLES, dtype="float32").reshape(-1, 1)
        self.shards = hvd.Shards(numbers, numbers, batch_size=BATCH, seed=4)
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
        self.model.compile(optimizer, "mse", metrics=[self._note], run_eagerly=True)
        self.trains = False

    def _note(self, targets: Any, outputs: Any) -> Any:
        if self.trains:
            self.seen.append([int(one) for one in keras.ops.convert_to_numpy(targets)[:, 0]])
        return keras.ops.mean(outputs)

    def run(self, callback: Any = None, **how: Any) -> None:
        def trains(batch: int, logs: Any) -> None:
            self.trains = True

        def rests(batch: int, logs: Any) -> None:
            self.trains = False

        noting = keras.callbacks.LambdaCallback(
            on_train_batch_begin=trains, on_train_batch_end=rests
        )
        callbacks = [noting, hvd.callbacks.RecordCallback(self.shards)]
        callbacks += [] if callback is None else [callback]
        how = {"shuffle": False, "initial_epoch": self.shards.epoch, "verbose": 0, **how}
        self.model.fit(self.shards, callbacks=callbacks, **how)


class Interrupted(Exception):
    """Ends a fit in the middle."""


def stop_in_the_middle(folder: str) -> Any:
    """Train an epoch and a part of the next; save the state."""
    start()
    fit = Fit()
    path = Path(folder) / "state.json"

    def save(batch: int, logs: Any) -> None:
        if fit.shards.epoch == 1 and batch == STOPPED_AFTER - 1:
            Path(folder, f"{hvd.rank()}").write_text(json.dumps(fit.shards.state_dict()))
            raise Interrupted

    with pytest.raises(Interrupted):
        fit.run(keras.callbacks.LambdaCallback(on_train_batch_end=save), epochs=3)
    states = hvd.allgather_object(fit.shards.state_dict())
    assert states == states[:1] * hvd.size()
    if hvd.rank() == 0:
        path.write_text(json.dumps(states[0]))
    with pytest.raises(hvd.ArgumentError, match="made with length"):
        wrong = hvd.Shards(np.zeros(SAMPLES + 1), seed=4)
        wrong.load_state_dict(states[0])
    return fit.seen


def resume(folder: str) -> Any:
    """Train on what is left of the epoch, and the epoch after."""
    start()
    fit = Fit()
    fit.shards.load_state_dict(json.loads((Path(folder) / "state.json").read_text()))
    assert fit.shards.epoch == 1
    with pytest.raises(hvd.ArgumentError, match="needs a fit"):
        fit.run(epochs=3)
    fit.run(epochs=2)
    rest, fit.seen = fit.seen, []
    fit.run(epochs=3)
    check_steps_per_epoch(fit)
    with pytest.raises(Exception, match="give fit.. shuffle=False"):
        fit.run(epochs=fit.shards.epoch + 1, shuffle=True)
    return rest, fit.seen[:6]


def check_steps_per_epoch(fit: Fit) -> None:
    """Keras may load an epoch too early; then there is an error, and no wrong samples."""
    fit.seen = []
    try:
        fit.run(epochs=fit.shards.epoch + 2, steps_per_epoch=len(fit.shards))
    except hvd.HvdliteError as error:
        assert "without steps_per_epoch" in str(error)
    else:
        both = np.split(np.array(flat(fit.seen)), 2)
        assert [sorted(one) for one in both] == [list(range(SAMPLES))] * 2
        assert list(both[0]) != list(both[1])


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_that_was_stopped_goes_on_with_other_ranks(backend: str, tmp_path: Path) -> None:
    how = {"env": environment(backend)}
    first = [one.value for one in run_world(2, stop_in_the_middle, str(tmp_path), **how)]
    batches = -(-SAMPLES // 2 // BATCH)
    assert [len(seen) for seen in first] == [batches + STOPPED_AFTER] * 2
    epoch = flat(seen for rank in first for seen in rank[:batches])
    assert Counter(epoch) == Counter(range(SAMPLES))
    begun = flat(seen for rank in first for seen in rank[batches:])
    rest = [one.value for one in run_world(1, resume, str(tmp_path), **how)]
    assert sorted(begun + flat(rest[0][0])) == list(range(SAMPLES))
