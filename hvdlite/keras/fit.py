"""Ranks that train in one `fit` end it after the same batch.

Callbacks of Keras decide by what their own rank sees. A rank that stops alone would leave the
others waiting in a step. So a callback of hvdlite adds `FitEnd`, which sees what all other
callbacks have done.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvdlite import basics, ops
from hvdlite.errors import (
    ArgumentError,
    DeadlockError,
    HvdliteError,
    MismatchError,
    ReplicasDifferWarning,
)
from hvdlite.keras.arrays import allreduce, describe_by_rank, exchange, word_sum
from hvdlite.keras.backend import keras_2
from hvdlite.keras.gradients import distributed_part, first_wire_name
from hvdlite.live.observed import observe_fit
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import (
    SILENCE,
    Comparison,
    Exchange,
    check_interval,
    check_name,
    divergence_of,
    ranks_text,
    refuse,
    speaks,
)

Logs = dict[str, Any] | None


class HasBatchHooks:
    """Tells `fit` of Keras 2 (`tf_keras`) which batches the callback wants to see."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class Callback(HasBatchHooks, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback for models of Keras 3 and of Keras 2."""


_HOOKS = ("on_epoch_begin", "on_train_batch_end", "on_test_begin", "on_epoch_end")


def last_callbacks(callback: Any) -> list[Any] | None:
    """Return callbacks that `fit` calls after all of the user's, to add to; None outside of `fit`.

    Of their hooks it calls those for the begin and the end of epochs, the end of training batches
    and the begin of validation, until the training ends.
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
        last: list[Any] = []
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


_COMPARED = {
    "steps": (
        "batches per epoch",
        "give every rank the same number of samples, or set steps_per_epoch={least} on all",
    ),
    "epochs": ("epochs", "give epochs={least} on all"),
}


def agree_on_fit(
    params: dict[str, Any], process_set: ProcessSet, **facts: Any
) -> list[dict[str, Any]]:
    """Return every rank's facts, by rank; raise if known numbers of batches or epochs differ."""
    # The others would wait in the middle of a step for a rank that ran out of batches.
    mine = {"steps": params.get("steps"), "epochs": params.get("epochs"), **facts}
    everyone = exchange(mine, next_name("keras.fit", member_id(process_set)), process_set)
    for key, (what, advice) in _COMPARED.items():
        values = [one[key] for one in everyone]
        known = {value for value in values if value is not None}
        if len(known) > 1:
            raise ArgumentError(
                f"rank {basics.rank()}: fit() would run different numbers of {what} "
                f"({describe_by_rank(values, process_set)}), but every step needs every rank; "
                + advice.format(least=min(known))
            )
    return everyone


class ReductionCheck:
    """Notices an update of the variables whose gradients were not reduced."""

    # A compiler may call the update and skip the reduction; the ranks' models then diverge. If each
    # step runs Python (on PyTorch), each step needs a reduction; if steps are traced, a reduction
    # must have been traced.

    def __init__(self, optimizer: Any) -> None:
        """Read the counts before a step; nothing is checked unless the optimizer is distributed."""
        self._part = distributed_part(optimizer)
        self._updates, self._reductions = self._counts()
        if keras.backend.backend() != "torch" or keras_2(self._part) is not None:
            self._reductions = 0

    def _counts(self) -> tuple[int, int]:
        if self._part is None:
            return 0, 0
        return int(self._part.iterations), self._part._distribution.reductions

    def check(self, steps: int) -> None:
        """Raise if, after `steps` steps so far, variables were updated by this rank's gradients."""
        updates, reductions = self._counts()
        # If the optimizer counts more steps, the script has set the count, and nothing is checked.
        if 0 < updates - self._updates <= steps and reductions == self._reductions:
            raise HvdliteError(
                f"rank {basics.rank()}: {type(self._part).__name__} has updated variables without "
                "a reduction of their gradients, so that the ranks' models would diverge; in a "
                "custom train_step call its apply() or apply_gradients(), and otherwise use "
                "jit_compile=False in compile(), and report this"
            )


def agree_on_end_of_epoch(optimizer: Any, batches: int) -> None:
    """Wait until every rank's epoch has ended, or raise if another rank's epoch goes on."""
    # The barrier has the wire name of the optimizer's first gradient. If another rank goes on with
    # a step, its allreduce and this barrier have the same name, and the core reports the mismatch.
    first = first_wire_name(optimizer)
    if first is None:
        return
    name, process_set = first
    with end_of_epoch(batches):
        basics.engine().barrier(name, process_set, blocking=True).wait()


@contextlib.contextmanager
def end_of_epoch(batches: int) -> Iterator[None]:
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


_looked_at: Any = None  # `warn_of_own_models` has checked the fit() of these params last.


def warn_of_own_models(model: Any, params: Any, process_set: ProcessSet, batch: int) -> None:
    """Warn, once in each `fit`, if ranks are about to train models that differ."""
    # Either the optimizer is not distributed, or its variables are not the same on all ranks, for
    # example because no broadcast was made. Callbacks have broadcast before the first batch if
    # every rank's model was built by then, and otherwise after it. The first rank warns. All
    # callbacks of one `fit` share its `params`. Variables are compared only if the optimizer has
    # the callback's process set, because then every rank that takes steps calls this function.
    global _looked_at
    if params is _looked_at:
        return
    first = first_wire_name(model.optimizer)
    if first is not None:
        if first[1] == member_id(process_set) and process_set.size() != 1:
            complete, text = _compare(model, first[0], process_set)
            if not complete and batch == 0:
                return
        else:
            text = None
    else:
        text = _not_distributed(model, process_set)
    _looked_at = params
    if text is not None:
        warnings.warn(text, ReplicasDifferWarning, stacklevel=2)


def expect_own_models(params: Any) -> None:
    """Do not warn in the `fit` of these `params`: ranks train and average models of their own."""
    global _looked_at
    _looked_at = params


def _compare(model: Any, name: str, process_set: ProcessSet) -> tuple[bool, str | None]:
    """Return whether every rank has variables, and the text of this rank's warning, or None."""
    local = distributed_part(model.optimizer)._distribution.is_local
    variables = [one for one in model.trainable_variables if not local(one)] if model.built else []
    sums = [word_sum(one) for one in variables]
    # `agree_on_end_of_epoch` uses this name, so that a rank whose epoch is over gets an error.
    numbers = Exchange(name, sums, process_set, blocking=True).finish()
    names = [str(getattr(one, "path", one.name)) for one in variables]
    root = process_set.ranks[0]
    advice = f"add hvd.callbacks.BroadcastGlobalVariablesCallback({root}) to the callbacks of fit()"
    divergence = divergence_of(names, numbers)
    complete = bool(variables) and len(numbers) == process_set.size()
    return complete, None if divergence is None else divergence.warning("fit()", advice)


def _not_distributed(model: Any, process_set: ProcessSet) -> str | None:
    """Return the text of this rank's warning if the model's optimizer is not distributed."""
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


class ReplicaCheck:
    """Compares the trained variables of all ranks, in every so many batches of one `fit`."""

    # The comparison begins before a batch and ends after it, so that no rank waits for it. The
    # first batch is left out, because callbacks may broadcast after it.

    def __init__(self, params: Any, owner: Any) -> None:
        self.params = params
        self.owner = weakref.ref(owner)  # Only this callback's hooks count in a `fit`.
        self._every = check_interval()
        self._batches = 0  # This counts batches that have begun.
        self._comparison: Comparison | None = None

    def begin_batch(self, model: Any, process_set: ProcessSet) -> None:
        """Count a batch, and send this rank's sums if ranks compare in it."""
        self._batches += 1
        due = self._every > 0 and self._batches > 1 and self._batches % self._every == 0
        if not due or not process_set.included() or process_set.size() == 1:
            return
        # Variables are compared only if the optimizer has the callback's process set, because then
        # every rank that takes steps calls this method.
        first = first_wire_name(model.optimizer)
        if first is None or first[1] != member_id(process_set):
            return
        names, variables = named_replicas(model)
        numbers = [word_sum(one) for one in variables]
        name = next_name("keras.replicas", member_id(process_set))
        self._comparison = Comparison(name, names, numbers, process_set, blocking=False)

    def end_batch(self, process_set: ProcessSet) -> None:
        """Look at what the ranks have sent; raise on every rank if variables differed."""
        comparison, self._comparison = self._comparison, None
        divergence = None if comparison is None else comparison.finish()
        if divergence is not None:
            refuse(divergence, check_name(f"batch {self._batches} of fit()"), process_set)


_check: ReplicaCheck | None = None  # This is the check of the last fit().


def check_of(callback: Any) -> ReplicaCheck | None:
    """Return the check of the `fit` that has this callback, if the callback's hooks call it."""
    global _check
    if callback.params is None:
        return None  # The script calls the hooks itself.
    if _check is None or _check.params is not callback.params:
        _check = ReplicaCheck(callback.params, callback)
    return _check if _check.owner() is callback else None


def named_replicas(model: Any) -> tuple[list[str], list[Any]]:
    """Return the trained variables of a model that are the same on all ranks, after their names."""
    part = distributed_part(model.optimizer)
    variables = [
        one
        for one in model.trainable_variables
        if part is None or not part._distribution.is_local(one)
    ]
    return [str(getattr(one, "path", one.name)) for one in variables], variables


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
