"""`StopCallback`: a signal to one rank ends every rank after the same batch."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hvdlite import basics, stop
from hvdlite.keras import batch_hooks
from hvdlite.keras.batch_hooks import Logs
from hvdlite.stop_marks import EXIT_STOPPED


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
