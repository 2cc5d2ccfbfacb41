"""The bases of states with tensors or variables: all adapters synchronize them in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdlite import basics
from hvdlite.elastic.state import ObjectState
from hvdlite.errors import MismatchError
from hvdlite.objects import broadcast_object


class TensorState(ObjectState):
    """A state with tensors that all ranks must have alike. Adapters say which they are."""

    def __init__(self, **kwargs: Any) -> None:
        """Make the attributes that are plain objects."""
        super().__init__(broadcast_object, basics.rank, **kwargs)

    def sync(self) -> None:
        """Replace the state of every rank by that of rank 0, and save it.

        Raises:
            MismatchError: this rank's tensors are not like rank 0's.
        """
        layout = self._layout()
        check_layout(layout, broadcast_object(layout, root_rank=0), basics.rank())
        self._sync_tensors()
        super().sync()

    def _layout(self) -> dict[str, str]:
        """Describe the tensors that must be alike on all ranks, by name."""
        raise NotImplementedError

    def _sync_tensors(self) -> None:
        """Receive rank 0's tensors."""
        raise NotImplementedError


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


def check_layout(mine: Mapping[str, str], roots: Mapping[str, str], rank: int) -> None:
    """Raise MismatchError if this rank's state does not hold the same tensors as rank 0's."""
    # Only ranks that differ from rank 0 raise, so that one rank that does not fit ends alone. By
    # name, `mine` and `roots` have the dtype and shape of each tensor here and on rank 0.
    for name in [*roots, *(name for name in mine if name not in roots)]:
        if mine.get(name) != roots.get(name):
            raise MismatchError(
                f"rank {rank} cannot receive the state of rank 0: '{name}' is "
                f"{mine.get(name, 'missing')} on rank {rank} and {roots.get(name, 'missing')} on "
                "rank 0; make the same model and optimizer on every rank"
            )
