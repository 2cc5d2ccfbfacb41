"""The base of states of TensorFlow's or Keras's variables, and the copies that they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.elastic.tensor_state import TensorState


class VariableCopies:
    """The values of variables at the last `save`, in arrays that the next one uses again."""

    def __init__(self, to_array: Callable[[Any], Any]) -> None:
        """Begin without copies; `to_array` returns a value as a NumPy array, copied or not."""
        self._to_array = to_array
        self._copies: dict[int, tuple[Any, Any]] = {}  # It has (variable, value) by id().

    def save(self, variables: Iterable[Any]) -> None:
        """Copy the values."""
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
        """Assign the copies."""
        for variable, buffer in self._copies.values():
            variable.assign(buffer)


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
        self._copies = VariableCopies(to_array)
        self._copies.save(self._variables())
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and the attributes."""
        self._copies.save(self._variables())
        super().save()

    def restore(self) -> None:
        """Go back to the last `save`."""
        self._copies.restore()
        super().restore()

    def _variables(self) -> list[Any]:
        """List what is saved and restored on this rank."""
        raise NotImplementedError
