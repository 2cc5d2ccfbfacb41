"""The base of states of TensorFlow's or Keras's variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.elastic.tensor_state import TensorState


class VariableState(TensorState):
    """A state that saves and restores variables. Adapters say which they are.

    A subclass has whatever `_variables` reads before it calls this class's constructor.
    """

    def __init__(self, to_array: Callable[[Any], Any], /, **kwargs: Any) -> None:
        """Save the variables and make the attributes.

        Args:
            to_array: returns the value of a variable as a NumPy array, copied or not.
            kwargs: the attributes; they travel pickled.

        Raises:
            ArgumentError: a value cannot be pickled, or an attribute has the name of a method.
        """
        self._to_array = to_array
        self._copies: dict[int, tuple[Any, Any]] = {}  # It has (variable, value) by id().
        self._copy_variables()
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and the attributes."""
        self._copy_variables()
        super().save()

    def restore(self) -> None:
        """Go back to the last `save`."""
        for variable, buffer in self._copies.values():
            variable.assign(buffer)
        super().restore()

    def _copy_variables(self) -> None:
        """Copy the values, into the arrays of the last copy where these suit."""
        before, self._copies = self._copies, {}
        for variable in self._variables():
            value = self._to_array(variable)
            _, buffer = before.get(id(variable), (None, None))
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = value.copy()
            else:
                buffer[...] = value
            self._copies[id(variable)] = (variable, buffer)

    def _variables(self) -> list[Any]:
        """List what is saved and restored on this rank."""
        raise NotImplementedError
