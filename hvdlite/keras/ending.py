"""Ranks that train in one `fit` end it after the same batch.

Callbacks of Keras decide by what their own rank sees. A rank that stops alone would leave the
others waiting in a step. So a callback of hvdlite adds `FitEnd`, which sees what all other
callbacks have done.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.keras.batch_hooks import Callback, Logs, last_callbacks
from hvdlite.keras.collectives import allreduce, describe_by_rank, exchange
from hvdlite.keras.distribution import first_wire_name
from hvdlite.keras.fit_checks import agree_on_fit, end_of_epoch
from hvdlite.keras.observing import observe_this_fit
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import Exchange, ranks_text, speaks


def begin_fit(
    callback: Any, epochs: bool = False, every: int = 0, **facts: Any
) -> list[dict[str, Any]]:
    """Compare what ranks are about to do in `fit`; return the facts of each, by rank, or raise."""
    # A callback calls this in its `on_train_begin`. `epochs` says that the ranks meet in each
    # epoch, `every` that they meet after so many batches, whatever their optimizers are. The
    # numbers of batches and epochs must not differ; if they do, every rank raises.
    process_set = callback.process_set
    observe_this_fit(callback)
    last = last_callbacks(callback)
    everyone = agree_on_fit(callback.params or {}, process_set, **facts, in_fit=last is not None)
    first = first_wire_name(callback.model.optimizer)
    name = None
    if first is not None and first[1] == member_id(process_set):
        name, every = first[0], 1
    if (every or epochs) and last is not None and all(one["in_fit"] for one in everyone):
        _add_end(last, callback, name, every)
    return everyone


class FitEnd(Callback):
    """Comes last in a `fit`: when a rank stops, all ranks stop."""

    def __init__(self, process_set: ProcessSet, name: str | None, every: int) -> None:
        super().__init__()
        self.process_set = process_set
        self._name = name  # It is None if these gradients are not reduced.
        self.every = every  # Ranks stop after a multiple of so many batches; 0: after an epoch.
        self._wants = False  # This rank is to stop when the ranks meet next.
        self._begun = False
        self._epoch = 0
        self._batches = 0  # It counts those of the epoch.
        self._met = 0  # It counts all batches of the `fit`.

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Compare the numbers of the first epochs; raise an ArgumentError if they differ."""
        self._epoch, self._batches = epoch, 0
        if self._begun:
            return
        self._begun = True
        name = next_name("keras.first_epoch", member_id(self.process_set))
        epochs = exchange(epoch, name, self.process_set)
        if len(set(epochs)) > 1:
            raise ArgumentError(
                f"rank {basics.rank()}: fit() would run different numbers of epochs (it begins "
                f"with epoch {describe_by_rank(epochs, self.process_set)}), but every step needs "
                "every rank; give all ranks the same initial_epoch, and BackupAndRestore the same "
                "backup"
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Stop if a rank stops here."""
        self._batches = batch + 1
        self._met += 1
        if not self.every:
            return
        if self._met % self.every:
            self._wants, self.model.stop_training = bool(self._stops()), False
            return
        mine = np.array([self._stops()], "int32")
        # The live view does not count all-reduces whose names begin with "#" as parts of a step.
        if allreduce(mine, "#keras.stop", op=ops.Max, process_set=self.process_set)[0]:
            numbers = Exchange("#keras.stops", [self._stops()], self.process_set, True).finish()
            self._stop(numbers, f"batch {batch} of epoch {self._epoch}")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stop if a rank stops here; raise if another rank's epoch goes on."""
        name = self._name or "#keras.end_of_fit"
        with end_of_epoch(self._batches):
            numbers = Exchange(name, [self._stops()], self.process_set, blocking=True).finish()
        if any(stops for (stops,) in numbers.values()):
            self._stop(numbers, f"epoch {epoch}")

    def _stops(self) -> int:
        return int(bool(self._wants or self.model.stop_training))

    def _stop(self, numbers: dict[int, list[int]], where: str) -> None:
        """Stop, and say so where some ranks alone wanted it."""
        self.model.stop_training = True
        stopped = [rank for rank, every in numbers.items() if every[0]]
        if len(stopped) < len(numbers) and speaks(numbers):
            print(
                f"hvdlite: fit() ends on all ranks after {where}, because {ranks_text(stopped)} "
                "set model.stop_training; callbacks that come after "
                "hvd.callbacks.MetricAverageCallback() decide alike on all ranks",
                file=sys.stderr,
            )


def _add_end(last: list[Any], callback: Any, name: str | None, every: int) -> None:
    """Add a `FitEnd` to the last callbacks, unless they have one for the same ranks."""
    for one in last:
        if isinstance(one, FitEnd) and one.process_set is callback.process_set:
            one.every = one.every or every
            return
    end = FitEnd(callback.process_set, name, every)
    end.set_params(callback.params)
    end.set_model(callback.model)
    last.append(end)
