"""`hvd.callbacks`: callbacks for `model.fit` on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras

from hvdlite import basics, stop
from hvdlite.keras.arrays import broadcast_variables
from hvdlite.keras.backend import optimizer_variables
from hvdlite.keras.fit import Callback, HasBatchHooks, Logs, begin_fit
from hvdlite.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdlite.keras.local_sgd import LocalSGDCallback
from hvdlite.keras.metrics import MetricAverageCallback
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.rendezvous.environment import EXIT_STOPPED

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "MetricAverageCallback",
    "StopCallback",
]


class BroadcastGlobalVariablesCallback(Callback):
    """Makes all ranks begin with one rank's weights and optimizer state.

    It broadcasts before the first batch if every rank's model is built by then, and otherwise after
    it. Each rank keeps its own states of random seeds. The callback also compares the numbers of
    batches and epochs, if they are known beforehand, and raises on every rank if they differ.

    Args:
        root_rank: the rank whose values all receive.
        device: ignored; scripts written for Horovod may pass it.
        local_variables: variables of the model that each rank keeps as they are.
        process_set: its members get the same values; by default all ranks.

    Example:
        >>> model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.local_variables = [] if local_variables is None else list(local_variables)
        self.process_set = process_set
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        check_root(self.root_rank, self.process_set)
        self.broadcast_done = False
        everyone = begin_fit(self, built=bool(self.model.built))
        if all(one["built"] for one in everyone):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self.broadcast_done:  # The first batch has built the model.
            self._broadcast()

    def _broadcast(self) -> None:
        shared = [
            one
            for one in self.model.weights
            if not any(one is local for local in self.local_variables)
        ]
        variables = [*shared, *optimizer_variables(self.model.optimizer, self.model)]
        broadcast_variables(variables, self.root_rank, self.process_set)
        self.broadcast_done = True


class BestModelCheckpoint(HasBatchHooks, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model when it is the best so far, on rank 0 only.

    After `MetricAverageCallback` in the list of callbacks, it judges the metrics of all ranks.

    Args:
        filepath: as for `keras.callbacks.ModelCheckpoint`, like all other arguments.
        monitor: the metric.
        verbose: 1 prints a line for each file.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        options: further arguments of `keras.callbacks.ModelCheckpoint`.

    Example:
        >>> best = hvd.callbacks.BestModelCheckpoint("best.keras", monitor="val_accuracy")
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        **options: Any,
    ) -> None:
        options.setdefault("save_best_only", True)
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, **options
        )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if basics.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if basics.rank() == 0:
            super().on_epoch_end(epoch, logs)


class StopCallback(Callback):
    """Saves, and ends every rank after the same batch, when a rank was asked to stop.

    A rank is asked to stop by a signal; see `hvd.stop_on`. The callback watches for SIGTERM and
    SIGUSR1 unless the script has called `hvd.stop_on` itself. Put it last: what comes before it has
    seen the batch.

    Args:
        save: a function without arguments; every rank calls it after the same batch.
        every: ask after so many batches; see `hvd.stop_requested`.

    Example:
        >>> def save():
        ...     if hvd.rank() == 0:
        ...         model.save("last.keras")
        >>> model.fit(data, callbacks=[hvd.callbacks.StopCallback(save)])
    """

    def __init__(self, save: Callable[[], object], every: int = 1) -> None:
        super().__init__()
        self.save = save
        self.every = every
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        if not stop.watched():
            stop.stop_on()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        reason = stop.stop_requested(self.every)
        if reason is None:
            return
        if basics.rank() == 0:
            where = f"batch {batch} of epoch {self._epoch}"
            print(f"hvdlite: stopping after {where} ({reason})", file=sys.stderr)
        self.save()
        raise SystemExit(EXIT_STOPPED)
