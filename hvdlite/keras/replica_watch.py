"""A callback that compares the trained variables of all ranks, once in so many batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite.divergence import array_word_sum, check_arguments, compare, react
from hvdlite.keras.adapters import optimizer_variables
from hvdlite.keras.batch_hooks import Callback, Logs
from hvdlite.keras.collectives import broadcast_variables
from hvdlite.keras.distribution import distributed_part
from hvdlite.process_sets import ProcessSet, global_process_set


class ReplicaWatchCallback(Callback):
    """Compares the bits of the trained variables of all ranks, once in so many batches.

    Variables of local layers are not compared, nor those that are not trained. The values pass
    through the host: choose `every` so that this is rare.

    Example:
        >>> model.fit(data, callbacks=[hvd.callbacks.ReplicaWatchCallback(every=1000)])
    """

    def __init__(
        self,
        every: int = 1000,
        then: str = "raise",
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Choose how often, and what happens.

        Args:
            every: batches from one comparison to the next, over all epochs of a `fit`; with
                `steps_per_execution` those that Keras calls callbacks for.
            then: what happens when variables differ. "raise" raises a `DivergenceError` on every
                rank; "warn" has the first rank warn (`ReplicasDifferWarning`); "repair" warns, and
                gives all ranks the variables of the majority, and the optimizer's. It raises the
                error where no rank has the majority's bits of all variables.
            process_set: its members compare; by default all ranks.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        super().__init__()
        check_arguments(every, then)
        self.every = every
        self.then = then
        self.process_set = process_set
        self._batches = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Count anew."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Compare after every so many batches."""
        self._batches += 1
        if self._batches % self.every == 0 and self.process_set.included():
            self._check()

    def _check(self) -> None:
        names, watched = named_replicas(self.model)
        divergence = compare(names, [word_sum(one) for one in watched], self.process_set)
        if divergence is None:
            return

        def repair(root: int) -> None:
            differing = [watched[i] for i in divergence.places]
            broadcast_variables(
                [*differing, *optimizer_variables(self.model)], root, self.process_set
            )

        owner = f"ReplicaWatchCallback, batch {self._batches}"
        react(divergence, self.then, owner, self.process_set, repair)


def named_replicas(model: Any) -> tuple[list[str], list[Any]]:
    """Return the trained variables of a model that are the same on all ranks, after their names."""
    part = distributed_part(model.optimizer)
    variables = [
        one
        for one in model.trainable_variables
        if part is None or not part._distribution.is_local(one)
    ]
    return [str(getattr(one, "path", one.name)) for one in variables], variables


def word_sum(variable: Any) -> int:
    """Sum the eight-byte words of a variable, with its bytes at the end, modulo 2^64."""
    return array_word_sum(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)))
