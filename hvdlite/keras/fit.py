"""One `fit` on several ranks: the ranks begin alike, reduce each gradient, and end together.

The callbacks of hvdlite call `begin_fit` when training begins. Callbacks of Keras decide by what
their own rank sees, and a rank that stops alone would leave the others waiting in a step. So
`begin_fit` adds callbacks that come after all others: one ends the `fit` on all ranks, one checks
that they train one model, and one tells the live view what `fit` does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvdlite import basics
from hvdlite.errors import (
    ArgumentError,
    DeadlockError,
    MismatchError,
    ReplicasDifferWarning,
)
from hvdlite.keras.arrays import describe_by_rank, exchange
from hvdlite.keras.gradients import distributed_part, first_wire_name, wire_name_over
from hvdlite.live.observed import observe_fit
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import (
    SILENCE,
    Comparison,
    Exchange,
    array_word_sum,
    check_interval,
    divergence_of,
    ranks_text,
    refuse,
)

Logs = dict[str, Any] | None


class HasBatchHooks:
    """Tells `fit` of Keras 2 (`tf_keras`) that the callback wants to see each batch."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    _implements_test_batch_hooks = _implements_train_batch_hooks
    _implements_predict_batch_hooks = _implements_train_batch_hooks


class Callback(HasBatchHooks, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback for models of Keras 3 and of Keras 2."""


_COMPARED = {
    "steps": (
        "batches per epoch",
        "give every rank the same number of samples, or set steps_per_epoch={least} on all",
    ),
    "epochs": ("epochs", "give epochs={least} on all"),
}


def begin_fit(
    callback: Any, epochs: bool = False, every: int = 0, own_models: bool = False, **facts: Any
) -> list[dict[str, Any]]:
    """Compare what ranks are about to do in `fit`; return the facts of each, by rank.

    A callback calls this in its `on_train_begin`. The ranks meet after so many batches (`every`)
    or in each epoch (`epochs`), and in each batch if the optimizer reduces gradients over them.
    With `own_models` ranks train different models on purpose.

    Every rank raises an ArgumentError if known numbers of batches or epochs differ, because the
    others would wait in the middle of a step for a rank that ran out of batches.
    """
    process_set, params = callback.process_set, callback.params or {}
    last = _last_callbacks(callback)
    facts = {**{key: params.get(key) for key in _COMPARED}, **facts, "in_fit": last is not None}
    everyone = exchange(facts, next_name("keras.fit", member_id(process_set)), process_set)
    for key, (what, advice) in _COMPARED.items():
        values = [one[key] for one in everyone]
        known = {value for value in values if value is not None}
        if len(known) > 1:
            raise ArgumentError(
                f"rank {basics.rank()}: fit() would run different numbers of {what} "
                f"({describe_by_rank(values, process_set)}), but every step needs every rank; "
                + advice.format(least=min(known))
            )
    name = wire_name_over(callback.model.optimizer, process_set)
    every = every if name is None else 1
    if last is not None:
        checks = last[1]
        checks.warns = checks.warns and not own_models
        if name is not None:
            checks.process_set = process_set  # All ranks that take steps are its members.
    if (every or epochs) and last is not None and all(one["in_fit"] for one in everyone):
        for one in last:
            if isinstance(one, _FitEnd) and one.process_set is process_set:
                one.every = one.every or every
                break
        else:
            last.append(_FitEnd(callback, name, every))
    return everyone


_HOOKS = (
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_epoch_end",
)


def _last_callbacks(callback: Any) -> list[Any] | None:
    """Return callbacks that `fit` calls after all of the user's, to add to; None outside of `fit`.

    Of their hooks it calls `_HOOKS`, until the training ends.
    """
    # `fit` puts its History, which it keeps in `model.history`, behind the user's callbacks. The
    # hooks of this object call the others.
    history = getattr(callback.model, "history", None)
    if history is None or callback.params is None or history.params is not callback.params:
        return None  # The script calls the hooks itself.
    kept = vars(history).get("_hvdlite_last")
    if kept is None or kept[0] is not callback.params:  # An earlier `fit` may have raised.
        for hook in _HOOKS:
            vars(history).pop(hook, None)
        last: list[Any] = [_Observer(callback), _Checks(callback)]
        kept = vars(history)["_hvdlite_last"] = (callback.params, last)
        for hook in _HOOKS:
            vars(history)[hook] = functools.partial(_call_all, getattr(history, hook), last, hook)
        vars(history)["on_train_end"] = functools.partial(_end, history)
    return kept[1]  # type: ignore[no-any-return]


def _call_all(own: Any, last: list[Any], hook: str, *args: Any, **options: Any) -> None:
    own(*args, **options)
    for one in last:
        getattr(one, hook)(*args, **options)


def _end(history: Any, logs: Logs = None) -> None:
    """Make the History an ordinary one again."""
    for name in (*_HOOKS, "_hvdlite_last", "on_train_end"):
        vars(history).pop(name, None)
    history.on_train_end(logs)


class _LastCallback(Callback):
    """Comes after all others in the `fit` that has this callback."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.set_params(callback.params)
        self.set_model(callback.model)
        self.process_set: ProcessSet = callback.process_set


class _FitEnd(_LastCallback):
    """When a rank stops, all ranks stop."""

    def __init__(self, callback: Any, name: str | None, every: int) -> None:
        super().__init__(callback)
        self._name = name  # of the first gradient; None if these ranks do not reduce gradients
        self.every = every  # Ranks stop after a multiple of so many batches; 0: after an epoch.
        self._wants = False  # This rank is to stop when the ranks meet next.
        self._begun = False
        self._epoch = 0
        self._batches = 0  # of the epoch
        self._met = 0  # batches of the whole `fit`

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
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
        self._batches = batch + 1
        self._met += 1
        if not self.every:
            return
        self._wants |= bool(self.model.stop_training)
        if self._met % self.every:
            self.model.stop_training = False
        else:
            self._meet("#keras.stop", f"batch {batch} of epoch {self._epoch}")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        with _end_of_epoch(self._batches):
            self._meet(self._name or "#keras.end_of_fit", f"epoch {epoch}")

    def _meet(self, name: str, where: str) -> None:
        """Stop if a rank stops here, and say so where some ranks alone wanted it."""
        stops = int(bool(self._wants or self.model.stop_training))
        numbers = Exchange(name, [stops], self.process_set, blocking=True).finish()
        stopped = [rank for rank, (stops,) in numbers.items() if stops]
        self.model.stop_training = bool(stopped)
        if stopped and len(stopped) < len(numbers) and next(iter(numbers)) == basics.rank():
            print(
                f"hvdlite: fit() ends on all ranks after {where}, because {ranks_text(stopped)} "
                "set model.stop_training; callbacks that come after "
                "hvd.callbacks.MetricAverageCallback() decide alike on all ranks",
                file=sys.stderr,
            )


def agree_on_end_of_epoch(optimizer: Any, batches: int) -> None:
    """Wait until every rank's epoch has ended, or raise if another rank's epoch goes on."""
    # The barrier has the wire name of the optimizer's first gradient. If another rank goes on with
    # a step, its allreduce and this barrier have the same name, and the core reports the mismatch.
    first = first_wire_name(optimizer)
    if first is not None:
        with _end_of_epoch(batches):
            basics.engine().barrier(*first, blocking=True).wait()


@contextlib.contextmanager
def _end_of_epoch(batches: int) -> Iterator[None]:
    """Explain the mismatch of an operation that meets another rank's gradient."""
    try:
        yield
    except DeadlockError:
        raise
    except MismatchError as error:
        raise ArgumentError(
            f"the epoch of rank {basics.rank()} ended after {batches} batches, and another rank's "
            "goes on, but every step needs every rank; give every rank the same number of samples, "
            f"or set steps_per_epoch={batches} on all [{error}]"
        ) from error


class _Checks(_LastCallback):
    """Checks that the optimizer is distributed, and that ranks have the same weights."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        self.warns = True  # once in a `fit`, of ranks that are about to train different models
        self._every = check_interval()  # HVDLITE_CHECK_REPLICAS; 0 never compares.
        self._batches = 0
        self._comparison: Comparison | None = None

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        # The comparison ends after the batch, so that no rank waits for it. The first batch is left
        # out, because callbacks may broadcast after it. Variables are compared if the optimizer has
        # a callback's process set: then every rank that takes steps calls this method.
        self._batches += 1
        due = self._every > 0 and self._batches > 1 and not self._batches % self._every
        name = None
        if (self.warns or due) and self.process_set.size() != 1:
            name = wire_name_over(self.model.optimizer, self.process_set)
        if self.warns:
            self._warn(batch, name)
        if due and name is not None:
            name = next_name("keras.replicas", member_id(self.process_set))
            replicas = _replicas(self.model)
            self._comparison = Comparison(name, *replicas, self.process_set, blocking=False)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        comparison, self._comparison = self._comparison, None
        divergence = None if comparison is None else comparison.divergence()
        if divergence is not None:
            owner = f"HVDLITE_CHECK_REPLICAS, batch {self._batches} of fit()"
            refuse(divergence, owner, self.process_set)

    def _warn(self, batch: int, name: str | None) -> None:
        """Warn on the first rank if ranks are about to train models that differ."""
        # Either the optimizer is not distributed, or its variables are not the same on all ranks,
        # for example because no broadcast was made. Callbacks have broadcast before the first batch
        # if every rank's model was built by then, and otherwise after it.
        model, process_set = self.model, self.process_set
        if name is None:
            text = _warning_if_not_distributed(model, process_set)
        else:
            names, sums = _replicas(model) if model.built else ([], [])
            # `agree_on_end_of_epoch` uses this name: a rank whose epoch is over gets an error.
            numbers = Exchange(name, sums, process_set, blocking=True).finish()
            complete = bool(names) and len(numbers) == process_set.size()
            if not complete and batch == 0:
                return
            root = process_set.ranks[0]
            divergence = divergence_of(names, numbers)
            advice = (
                f"add hvd.callbacks.BroadcastGlobalVariablesCallback({root}) to the callbacks of "
                "fit()"
            )
            text = None if divergence is None else divergence.warning("fit()", advice)
        self.warns = False
        if text is not None:
            warnings.warn(text, ReplicasDifferWarning, stacklevel=2)


def _replicas(model: Any) -> tuple[list[str], list[int]]:
    """Return the names of the trained variables that all ranks share, and the sums of words."""
    local = distributed_part(model.optimizer)._reduction.is_local
    variables = [one for one in model.trainable_variables if not local(one)]
    arrays = [np.ascontiguousarray(keras.ops.convert_to_numpy(one)) for one in variables]
    names = [str(getattr(one, "path", one.name)) for one in variables]
    return names, [array_word_sum(array) for array in arrays]


def _warning_if_not_distributed(model: Any, process_set: ProcessSet) -> str | None:
    optimizer = model.optimizer
    if optimizer is None or distributed_part(optimizer) is not None:
        return None
    maker = getattr(model.train_step, "__module__", "").partition(".")[0]
    if maker not in ("keras", "tf_keras"):
        return None  # A custom train_step may reduce gradients itself, for example with a tape.
    if process_set.size() == 1 or basics.rank() != process_set.ranks[0]:
        return None
    return (
        f"fit() applies the gradients of each rank alone, although it has callbacks of hvdlite: "
        f"its optimizer, {type(optimizer).__name__}, is not distributed, so that ranks train "
        "models of their own; give compile() "
        f"optimizer=hvd.DistributedOptimizer({type(optimizer).__name__}(...)); {SILENCE}"
    )


_LOOK_SECONDS = 0.5  # between two looks at the model, which wait for a GPU
_MOST_NUMBERS = 32  # of the logs


class _Observer(_LastCallback):
    """Tells the live view and the report how many samples `fit` has done, and what it logs."""

    # Samples are those that the model's loss has counted: without a loss, in a custom `train_step`,
    # there are only the logs.

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        self._looked = 0.0
        self._told = 0  # samples of this epoch
        self._trains = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._trains, self._told = True, 0  # The model's metrics begin anew, too.

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._tell(logs)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Tell the rest of the epoch, before validation resets the metrics."""
        self._tell(None)
        self._trains = False

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Tell the rest of the epoch, if there was no validation, and the epoch's numbers."""
        self._tell(logs)
        self._trains = False

    def _tell(self, logs: Logs) -> None:
        before = self._told
        if self._trains:
            self._told = _samples_of(self.model)
            self._looked = time.monotonic()
        values = list(numbers_in(logs).items())[:_MOST_NUMBERS]
        observe_fit(max(0, self._told - before), dict(values))


def _samples_of(model: Any) -> int:
    """Return the samples of this epoch, as the metric of the loss counts them; 0 without one."""
    for metric in model.metrics:
        if metric.name == "loss" and hasattr(metric, "count"):
            return round(float(keras.ops.convert_to_numpy(metric.count)))
    return 0


def numbers_in(logs: Logs) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in (logs or {}).items()
        if isinstance(value, int | float) or getattr(value, "shape", None) == ()
    }
