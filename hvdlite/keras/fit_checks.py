"""What is checked about a call of `fit`: that ranks agree, and that gradients are reduced."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from hvdlite import basics
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, ReplicasDifferWarning
from hvdlite.keras.adapters import keras_2
from hvdlite.keras.collectives import checksum, describe_by_rank, exchange
from hvdlite.keras.distribution import distributed_part, first_wire_name
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import SILENCE, Exchange, difference, speaks

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
    """Compare the numbers of batches and epochs, where they are known beforehand.

    A rank that ran out of batches would leave the others waiting for it in the middle of a step.

    Args:
        params: those of a callback.
        process_set: whose members train together.
        facts: what else to exchange.

    Returns:
        The facts of every rank, by rank.

    Raises:
        ArgumentError: the ranks' numbers differ; on every rank.
    """
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
    """Notices an update of the variables whose gradients were not reduced.

    Compilers have been seen to call the update past the reduction; ranks then train apart. Where
    each step runs Python (on PyTorch) the step needs a reduction; where steps are traced, one must
    have been traced.
    """

    def __init__(self, optimizer: Any) -> None:
        """Look at the counts before a step.

        Args:
            optimizer: of the model; nothing is checked unless it is distributed.
        """
        self._part = distributed_part(optimizer)
        self._updates, self._reductions = self._counts()
        if keras.backend.backend() != "torch" or keras_2(self._part) is not None:
            self._reductions = 0

    def _counts(self) -> tuple[int, int]:
        if self._part is None:
            return 0, 0
        return int(self._part.iterations), self._part._distribution.reductions

    def check(self, steps: int) -> None:
        """Compare after the step.

        Args:
            steps: how many there were; where the optimizer counts more, somebody has written the
                count.

        Raises:
            HvdliteError: variables were updated with gradients of this rank alone.
        """
        updates, reductions = self._counts()
        if 0 < updates - self._updates <= steps and reductions == self._reductions:
            raise HvdliteError(
                f"rank {basics.rank()}: {type(self._part).__name__} has updated variables without "
                "a reduction of their gradients, and ranks would train apart; in a train_step of "
                "your own call its apply() or apply_gradients(), and otherwise use "
                "jit_compile=False in compile(), and report this"
            )


def agree_on_end_of_epoch(optimizer: Any, batches: int) -> None:
    """Wait until every rank's epoch has ended.

    The barrier has the name of the optimizer's first gradient: a rank that goes on meets it there,
    and the core compares what ranks want under one name.

    Args:
        optimizer: of the model; nothing happens unless it is distributed.
        batches: how many this rank's epoch had.

    Raises:
        ArgumentError: another rank's epoch goes on.
    """
    place = first_wire_name(optimizer)
    if place is None:
        return
    name, process_set = place
    try:
        basics.engine().barrier(name, process_set, blocking=True).wait()
    except MismatchError as error:
        raise ArgumentError(
            f"the epoch of rank {basics.rank()} ended after {batches} batches, and another rank's "
            "goes on, but every step needs every rank; give every rank the same number of samples, "
            f"or set steps_per_epoch={batches} on all [{error}]"
        ) from error


_looked_at: Any = None  # the params of the fit() that `warn_of_own_models` has seen last


def warn_of_own_models(model: Any, params: Any, process_set: ProcessSet, batch: int) -> None:
    """Warn, once in each `fit`, where ranks are about to train models that differ.

    Either the optimizer is not distributed, or the variables that it trains are not the same on all
    ranks, as where nothing broadcasts them. Callbacks have broadcast before the first batch where
    every rank's model was built by then, and after it otherwise. The first rank warns.

    Args:
        model: that is trained.
        params: those of a callback, which all callbacks of one `fit` share.
        process_set: of the callback. Variables are compared where it is that of the optimizer:
            then every rank that takes steps comes by here.
        batch: the number of the batch that begins.
    """
    global _looked_at
    if params is _looked_at:
        return
    place = first_wire_name(model.optimizer)
    if place is not None:
        if place[1] == member_id(process_set) and process_set.size() != 1:
            complete, text = _compare(model, place[0], process_set)
            if not complete and batch == 0:
                return
        else:
            text = None
    else:
        text = _not_distributed(model, process_set)
    _looked_at = params
    if text is not None:
        warnings.warn(text, ReplicasDifferWarning, stacklevel=2)


def _compare(model: Any, name: str, process_set: ProcessSet) -> tuple[bool, str | None]:
    """Say whether every rank has variables, and what to warn of on this rank.

    A rank whose epoch is over meets the others under this name, see `agree_on_end_of_epoch`.
    """
    local = distributed_part(model.optimizer)._distribution.is_local
    variables = [one for one in model.trainable_variables if not local(one)] if model.built else []
    exchanged = Exchange(name, [checksum(one) for one in variables], process_set, blocking=True)
    numbers = exchanged.finish()
    names = [str(getattr(one, "path", one.name)) for one in variables]
    root = process_set.ranks[0]
    advice = f"add hvd.callbacks.BroadcastGlobalVariablesCallback({root}) to the callbacks of fit()"
    text = difference("fit()", names, numbers, advice)
    complete = bool(variables) and len(numbers) == process_set.size()
    return complete, text if speaks(numbers) else None


def _not_distributed(model: Any, process_set: ProcessSet) -> str | None:
    """Say what to warn of on this rank where its own gradients alone are applied."""
    optimizer = model.optimizer
    if optimizer is None or distributed_part(optimizer) is not None:
        return None
    maker = getattr(model.train_step, "__module__", "").partition(".")[0]
    if maker not in ("keras", "tf_keras"):
        return None  # A train_step of the user's own may well reduce, by a tape for example.
    if process_set.size() == 1 or basics.rank() != process_set.ranks[0]:
        return None
    return (
        f"fit() applies the gradients of each rank alone, although it has callbacks of hvdlite: "
        f"its optimizer, {type(optimizer).__name__}, is not distributed, so that ranks train "
        "models of their own; give compile() "
        f"optimizer=hvd.DistributedOptimizer({type(optimizer).__name__}(...)); {SILENCE}"
    )
