"""The replica check of HVDLITE_CHECK_REPLICAS in `fit`: replicas are compared while batches train.

The hooks of hvdlite's callbacks call it, so that scripts need no callback of their own for it. All
callbacks of one `fit` share the replica check, as they share `params`.
"""

from __future__ import annotations

import weakref
from typing import Any

from hvdlite.keras.collectives import word_sum
from hvdlite.keras.distribution import distributed_part, first_wire_name
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import Comparison, check_interval, check_name, refuse


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
