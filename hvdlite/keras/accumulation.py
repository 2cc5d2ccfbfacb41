"""Gradients of several batches, summed on this rank before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


class Accumulator:
    """Holds the sums of the gradients of some variables, and the number of batches in them.

    Its variables do not belong to the optimizer, so they are never saved with it.
    """

    def __init__(self, variables: Sequence[Any], passes: int, average: bool) -> None:
        """Make empty sums.

        Args:
            variables: all variables with which the optimizer was built.
            passes: the number of batches per update.
            average: whether an update gets the mean of its batches instead of their sum.
        """
        self._passes = passes
        self._scale = 1.0 / passes if average else 1.0
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
            initializer="zeros", shape=(), dtype="int32", trainable=False, name="hvdlite_passes"
        )
        self._have_gradients: set[int] = set()

    def add(
        self,
        gradients: Sequence[Any],
        indices: Sequence[int],
        then: Callable[[list[Any]], None],
    ) -> None:
        """Add the gradients of one batch; after the last batch call `then` with the sums.

        In a traced function, `then` is traced once.

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

        keras.ops.cond(keras.ops.equal(self._count, self._passes), update, lambda: None)

    def _sum(self, index: int) -> Any:
        if index not in self._have_gradients:
            return None
        return keras.ops.multiply(self._sums[index], self._scale)
