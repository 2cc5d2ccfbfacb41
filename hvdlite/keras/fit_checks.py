"""What is checked about a call of `fit`: that ranks agree, and that gradients are reduced."""

from __future__ import annotations

from typing import Any

import keras

from hvdlite import basics
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.keras.adapters import keras_2
from hvdlite.keras.collectives import describe_by_rank, exchange
from hvdlite.keras.distribution import distributed_part, first_wire_name
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, member_id

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
