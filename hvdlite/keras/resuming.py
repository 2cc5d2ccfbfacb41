"""Callbacks for jobs that stop and go on: what was trained on, and a signal to stop."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hvdlite import basics, stop
from hvdlite.errors import ArgumentError
from hvdlite.keras import batch_hooks
from hvdlite.keras.batch_hooks import Logs
from hvdlite.keras.shards import Shards
from hvdlite.stop_marks import EXIT_STOPPED


class RecordCallback(batch_hooks.Callback):
    """Records in `hvd.Shards` what `fit` has trained on, and begins its epochs.

    Put it before callbacks that save the state of the shards.

    Example:
        >>> shards = hvd.Shards(inputs, labels, batch_size=32)
        >>> model.fit(shards, shuffle=False, callbacks=[hvd.callbacks.RecordCallback(shards)])
    """

    def __init__(self, shards: Shards) -> None:
        """Choose the data set.

        Args:
            shards: the data that `fit` trains on.
        """
        super().__init__()
        self.shards = shards
        self._batches = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Forget the batches of another `fit`."""
        self.shards.begin_fit()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin the data's epoch, or its rest; raise if `fit` has another number of batches."""
        shards, steps = self.shards, self.params.get("steps")
        shards.begin_pass(epoch)
        self._batches = 0
        if steps is not None and steps != len(shards):
            raise ArgumentError(
                f"rank {basics.rank()}: fit() takes {steps} batches in epoch {epoch}, which has "
                f"{len(shards)} for each rank; what is left of an epoch that was resumed needs a "
                "fit() of its own: initial_epoch=shards.epoch, epochs=shards.epoch + 1"
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Record the batches since the last call."""
        self.shards.record_batches(self._batches, batch + 1)
        self._batches = batch + 1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Begin the next epoch: a state that is saved from here on belongs to it."""
        self.shards.set_epoch(epoch + 1)


class StopCallback(batch_hooks.Callback):
    """Saves, and ends every rank after the same batch, when a rank was asked to stop.

    A rank is asked to stop by a signal; see `hvd.stop_on`. The callback watches for SIGTERM and
    SIGUSR1 unless the script has called `hvd.stop_on` itself. Put it last: what comes before it has
    seen the batch.

    Example:
        >>> def save():
        ...     if hvd.rank() == 0:
        ...         model.save("last.keras")
        >>> model.fit(data, callbacks=[hvd.callbacks.StopCallback(save)])
    """

    def __init__(self, save: Callable[[], object], every: int = 1) -> None:
        """Choose what to do before the end.

        Args:
            save: a function without arguments; every rank calls it after the same batch.
            every: ask after so many batches; see `hvd.stop_requested`.
        """
        super().__init__()
        self.save = save
        self.every = every
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Watch for signals."""
        if not stop.watched():
            stop.stop_on()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Save, and exit with `hvd.EXIT_STOPPED`, if a rank was asked to stop."""
        reason = stop.stop_requested(self.every)
        if reason is None:
            return
        if basics.rank() == 0:
            where = f"batch {batch} of epoch {self._epoch}"
            print(f"hvdlite: stopping after {where} ({reason})", file=sys.stderr)
        self.save()
        raise SystemExit(EXIT_STOPPED)
