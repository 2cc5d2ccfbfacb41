"""Tells the live view and the report what `fit` does."""

from __future__ import annotations

import time
from typing import Any

import keras

from hvdlite.keras.batch_hooks import Callback, Logs, last_callbacks
from hvdlite.observed import observe_fit

_APART = 0.5  # Two looks at the model, which wait for a GPU, are so many seconds apart.
_MOST = 32  # So many numbers of the logs are kept at most.


def observe_this_fit(callback: Any) -> None:
    """Observe the `fit` that has this callback from now on, if it is not observed already."""
    last = last_callbacks(callback)
    if last is not None and not any(isinstance(one, _Observer) for one in last):
        observer = _Observer()
        observer.set_model(callback.model)
        last.append(observer)


class _Observer(Callback):
    """Tells how many samples were trained on, and the numbers of the logs."""

    # Samples are those that the model's loss has counted: without a loss, in a custom `train_step`,
    # there are only the logs. It looks twice a second, and at the end of each epoch.

    def __init__(self) -> None:
        super().__init__()
        self._looked = 0.0  # It looked last at this time.
        self._seen = 0  # So many samples of this epoch were reported.
        self._trains = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Count anew, as the model's metrics do."""
        self._trains, self._seen = True, 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Tell what has happened, if it is time."""
        if time.monotonic() - self._looked >= _APART:
            self._tell(logs)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Tell the rest of the epoch, before validation resets the metrics."""
        if self._trains:
            self._tell(None)
            self._trains = False

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Tell the rest of the epoch, if there was no validation, and the epoch's numbers."""
        if not self._trains:
            observe_fit(0, _numbers(logs))
        else:
            self._tell(logs)
        self._trains = False

    def _tell(self, logs: Logs) -> None:
        count = _samples_of(self.model)
        self._looked = time.monotonic()
        observe_fit(max(0, count - self._seen), _numbers(logs))
        self._seen = count


def _samples_of(model: Any) -> int:
    """Return the samples of this epoch, as the metric of the loss counts them; 0 without one."""
    for metric in model.metrics:
        if metric.name == "loss" and hasattr(metric, "count"):
            return round(float(keras.ops.convert_to_numpy(metric.count)))
    return 0


def _numbers(logs: Logs) -> dict[str, float]:
    """Pick the numbers of the logs."""
    found = {
        name: float(value)
        for name, value in (logs or {}).items()
        if isinstance(value, int | float) or getattr(value, "shape", None) == ()
    }
    return dict(list(found.items())[:_MOST])
