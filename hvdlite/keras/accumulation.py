"""Gradients of several batches, summed on this rank before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


class Accumulator:
    """Holds the sums of the gradients of some variables, and the number of batches in them.

    Its variables do not belong to the optimizer, so they are never saved with it. In an elastic
    job `KerasState` saves and restores them on each rank by itself.
    """

    def __init__(self, passes: int, average: bool) -> None:
        """Choose what an update gets; `build` makes the sums.

        Args:
            passes: the number of batches per update.
            average: whether an update gets the mean of its batches instead of their sum.
        """
        self.passes = passes
        self._scale = 1.0 / passes if average else 1.0
        self._sums: list[Any] = []
        self._count: Any = None  # a variable, once it is built
        self._first_count = 0  # what the variable begins with
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
        """Make empty sums; a second call does nothing.

        Args:
            variables: all variables with which the optimizer was built.
        """
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
        """Empty the sums, outside of traced functions.

        Args:
            count: how many batches the other ranks' sums have, so that all update together.
        """
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
        """Add the gradients of one batch; after the last batch call `then` with the sums.

        In a traced function, `then` is traced once. If it fails, the next batch tries again.

        Args:
            gradients: the gradients of the variables with these indices, or None.
            indices: the positions of the variables.
            then: receives the sums; None for a variable that never had a gradient.
        """
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is not None:
                self._have_gradients.add(index)
                total = self._sums[index]
                dense = keras.ops.convert_to_tensor(gradient)
                total.assign_add(keras.ops.cast(dense, total.dtype))
        self._count.assign_add(1)

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
