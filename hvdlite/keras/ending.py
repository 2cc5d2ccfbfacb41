"""Ranks that train in one `fit` end it after the same batch, with the same learning rate.

Callbacks of Keras decide by what their own rank sees. A rank that stops alone would leave the
others waiting in a step, and a learning rate that changes on one rank makes models drift apart. So
a callback of hvdlite adds `FitEnd` to the list of callbacks, which sees what all others have done.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import numpy as np

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, ReplicasDifferWarning
from hvdlite.keras.batch_hooks import Callback, Logs
from hvdlite.keras.collectives import allreduce, describe_by_rank, exchange
from hvdlite.keras.distribution import first_wire_name
from hvdlite.keras.fit_checks import agree_on_fit, end_of_epoch, has_warned_of
from hvdlite.keras.observing import observe_this_fit
from hvdlite.keras.optimizer_options import rate_bits, rates_difference
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import SILENCE, Exchange, ranks_text, speaks

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_DECIDE_BY_METRICS = {"EarlyStopping", "ReduceLROnPlateau", "BestModelCheckpoint"}


def begin_fit(
    callback: Any, epochs: bool = False, batches: bool = False, **facts: Any
) -> list[dict[str, Any]]:
    """Compare what ranks are about to do in `fit`; return the facts of each, by rank, or raise."""
    # A callback calls this in its `on_train_begin`. `epochs` and `batches` say that the ranks meet
    # in each epoch, and need the same batches, whatever their optimizers are. The numbers of
    # batches and epochs must not differ; if they do, every rank raises.
    process_set = callback.process_set
    observe_this_fit(callback)
    found = _running_list()
    own = [] if found is None else list(found.callbacks)
    everyone = agree_on_fit(
        callback.params or {},
        process_set,
        **facts,
        has_list=found is not None,
        may_stop=any(_may_stop_in_a_batch(one) for one in own),
        too_early=_too_early(own),
    )
    first = first_wire_name(callback.model.optimizer)
    reduces = first is not None and first[1] == member_id(process_set)
    if (reduces or epochs or batches) and all(one["has_list"] for one in everyone):
        in_batches = (reduces or batches) and any(one["may_stop"] for one in everyone)
        _add_end(found, callback, first[0] if reduces and first else None, in_batches)
    _warn_of_order(everyone, process_set)
    return everyone


class FitEnd(Callback):
    """Comes last in the callbacks of a `fit`: when a rank stops, all ranks stop."""

    # It also compares the learning rates at the end of each epoch.

    def __init__(self, process_set: ProcessSet, name: str | None, in_batches: bool) -> None:
        super().__init__()
        self.process_set = process_set
        self._name = name  # It is None if these gradients are not reduced.
        self.in_batches = in_batches  # It is set if a rank may stop before the end of an epoch.
        self._begun = False
        self._warned = False
        self._epoch = 0
        self._batches = 0

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
        if not self.in_batches:
            return
        mine = np.array([self._stops()], "int32")
        if allreduce(mine, "#keras.stop", op=ops.Max, process_set=self.process_set)[0]:
            numbers = Exchange("#keras.stops", [self._stops()], self.process_set, True).finish()
            self._stop(numbers, f"batch {batch} of epoch {self._epoch}")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stop if a rank stops here; raise if another rank's epoch goes on; compare the rates."""
        optimizer = self.model.optimizer
        mine = [self._stops(), rate_bits(optimizer) if self._name is not None else 0]
        name = self._name or "#keras.end_of_fit"
        with end_of_epoch(self._batches):
            numbers = Exchange(name, mine, self.process_set, blocking=True).finish()
        if any(stops for stops, _ in numbers.values()):
            self._stop(numbers, f"epoch {epoch}")
        difference = rates_difference({rank: bits for rank, (_, bits) in numbers.items()})
        if difference is not None and not self._warned:
            self._warned = True
            if speaks(numbers) and not has_warned_of(self.params):
                warnings.warn(
                    f"fit(): after epoch {epoch} {difference}, so that ranks train models of their "
                    "own; give fit() the same callbacks on all ranks, after "
                    f"hvd.callbacks.MetricAverageCallback(); {SILENCE}",
                    ReplicasDifferWarning,
                    stacklevel=2,
                )

    def _stops(self) -> int:
        return int(bool(self.model.stop_training))

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


def _add_end(found: Any, callback: Any, name: str | None, in_batches: bool) -> None:
    """Put a `FitEnd` last into a list of callbacks, instead of one for the same ranks."""
    for one in [one for one in found.callbacks if isinstance(one, FitEnd)]:
        if one.process_set is callback.process_set:
            found.callbacks.remove(one)
            in_batches = in_batches or (one.params is callback.params and one.in_batches)
    end = FitEnd(callback.process_set, name, in_batches)
    end.set_params(callback.params)
    end.set_model(callback.model)
    found.callbacks.append(end)


def _running_list() -> Any:
    """Return the list of callbacks that is calling hooks, or None if the script calls them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(each.__name__ == "CallbackList" for each in type(owner).__mro__):
            return owner
        frame = frame.f_back
    return None


def _may_stop_in_a_batch(callback: Any) -> bool:
    """Return whether it has code for batches that may stop `fit`: TerminateOnNaN, or a user's."""
    if _is_one_of(callback, {"TerminateOnNaN"}):
        return True
    hooks = [getattr(callback, name, None) for name in _BATCH_HOOKS]
    homes = {str(getattr(one, "__module__", "")).partition(".")[0] for one in hooks if one}
    return not homes <= {"keras", "tf_keras", "hvdlite"}


def _too_early(callbacks: list[Any]) -> list[str]:
    """List callbacks that decide by metrics, and come before the one that averages these."""
    averages = [i for i, one in enumerate(callbacks) if _is_one_of(one, {"MetricAverageCallback"})]
    before = callbacks[: averages[0]] if averages else []
    return [type(one).__name__ for one in before if _is_one_of(one, _DECIDE_BY_METRICS)]


def _is_one_of(callback: Any, names: set[str]) -> bool:
    return any(each.__name__ in names for each in type(callback).__mro__)


def _warn_of_order(everyone: list[dict[str, Any]], process_set: ProcessSet) -> None:
    """Warn on the first rank whose callbacks decide before metrics are averaged."""
    ranks = [r for r, one in zip(process_set.ranks, everyone, strict=True) if one["too_early"]]
    if len(everyone) == 1 or not ranks or basics.rank() != ranks[0]:
        return
    names = everyone[process_set.ranks.index(ranks[0])]["too_early"]
    warnings.warn(
        f"{names[0]} comes before MetricAverageCallback in the callbacks of fit() on "
        f"{ranks_text(ranks)}, and decides by the metrics of its own rank, so that ranks may "
        f"decide differently; put hvd.callbacks.MetricAverageCallback() first; {SILENCE}",
        ReplicasDifferWarning,
        stacklevel=2,
    )
