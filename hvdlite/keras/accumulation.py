"""Gradients of several batches, summed on this rank before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


class Accumulator:
    """Holds the sums of the gradients of some variables, and the number of batches in them."""

    # Its variables do not belong to the optimizer, so they are never saved with it. In an elastic
    # job `KerasState` saves and restores them on each rank separately.

    def __init__(self, passes: int, average: bool) -> None:
        """Choose batches per update, and their mean or sum; `build` makes the sums."""
        self.passes = passes
        self._scale = 1.0 / passes if average else 1.0
        self._sums: list[Any] = []
        self._count: Any = None  # `build` makes this variable.
        self._first_count = 0  # The variable begins with this.
        self._have_gradients: set[int] = set()

    @property
    def built(self) -> bool:
        """Whether it has its variables."""
        return self._count is not None

    @property
    def variables(self) -> list[Any]:
        """The sums and the count, which are this rank's own; none before `build`."""
        return [*self._sums, self._count] if self.built else []

    @property
    def count(self) -> int:
        """The number of batches in the sums."""
        return int(self._count) if self.built else self._first_count

    def build(self, variables: Sequence[Any]) -> None:
        """Make empty sums of the optimizer's variables; a second call does nothing."""
        if self.built:
            return
        self._sums = [
            keras.Variable(
                initializer="zeros",
                shape=variable.shape,
                dtype=keras.backend.standardize_dtype(variable.dtype),
                trainable=False,
                name=f"hvdlite_sum_{index}",
            )
            for index, variable in enumerate(variables)
        ]
        self._count = keras.Variable(
            initializer=keras.initializers.Constant(self._first_count),
            shape=(),
            dtype="int32",
            trainable=False,
            name="hvdlite_passes",
        )

    def clear(self, count: int = 0) -> None:
        """Empty the sums outside of traced functions; `count` batches are in other ranks' sums."""
        self._first_count = count
        for total in self._sums:
            total.assign(keras.ops.zeros_like(total))
        if self.built:
            self._count.assign(count)

    def add(
        self,
        gradients: Sequence[Any],
        indices: Sequence[int],
        then: Callable[[list[Any]], None],
    ) -> None:
        """Add the gradients of one batch; after the last batch call `then` with the sums."""
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is not None:
                self._have_gradients.add(index)
                total = self._sums[index]
                dense = keras.ops.convert_to_tensor(gradient)
                total.assign_add(keras.ops.cast(dense, total.dtype))
        self._count.assign_add(1)

        # In a traced function `then` is traced once. It gets None for a variable that never had a
        # gradient. If it fails, the next batch tries again.
        def update() -> None:
            then([self._sum(index) for index in indices])
            for index in indices:
                self._sums[index].assign(keras.ops.zeros_like(self._sums[index]))
            self._count.assign(0)

        keras.ops.cond(keras.ops.greater_equal(self._count, self.passes), update, lambda: None)

    def _sum(self, index: int) -> Any:
        if index not in self._have_gradients:
            return None
        return keras.ops.multiply(self._sums[index], self._scale)
