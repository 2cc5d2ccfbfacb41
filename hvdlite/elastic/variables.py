"""Copies of variables of TensorFlow or Keras, in arrays that are used again for the next copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.bootstrap import environment
from hvdlite.errors import ArgumentError


class VariableCopies:
    """The values of variables at the last `save`.

    With HVDLITE_ELASTIC_SNAPSHOT=0 nothing is copied.
    """

    def __init__(self, to_array: Callable[[Any], Any]) -> None:
        """Begin without copies.

        Args:
            to_array: returns the value of a variable as a NumPy array, copied or not.
        """
        self._to_array = to_array
        self._copies: dict[int, tuple[Any, Any]] = {}  # by identity: a variable, its value
        self._enabled = environment.elastic_snapshot()

    def save(self, variables: Iterable[Any]) -> None:
        """Copy the values."""
        if not self._enabled:
            return
        before, self._copies = self._copies, {}
        for variable in variables:
            value = self._to_array(variable)
            _, buffer = before.get(id(variable), (None, None))
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = value.copy()
            else:
                buffer[...] = value
            self._copies[id(variable)] = (variable, buffer)

    def restore(self) -> None:
        """Assign the copies.

        Raises:
            ArgumentError: nothing was copied.
        """
        if not self._enabled:
            raise ArgumentError(
                "the state cannot be restored: HVDLITE_ELASTIC_SNAPSHOT=0 turned the copies of "
                "tensors off; unset it, or start the job again from a checkpoint"
            )
        for variable, buffer in self._copies.values():
            variable.assign(buffer)
