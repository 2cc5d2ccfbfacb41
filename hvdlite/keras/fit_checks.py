"""Checks of a call of `fit`: that ranks do the same, and that gradients are reduced."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from hvdlite import basics
from hvdlite.errors import (
    ArgumentError,
    DeadlockError,
    HvdliteError,
    MismatchError,
    ReplicasDifferWarning,
)
from hvdlite.keras.adapters import keras_2
from hvdlite.keras.collectives import describe_by_rank, exchange, word_sum
from hvdlite.keras.distribution import distributed_part, first_wire_name
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import SILENCE, Exchange, divergence_of

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
