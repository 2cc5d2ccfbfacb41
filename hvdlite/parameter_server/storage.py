"""What a server asks of an adapter: to hold the values of tensors, and to apply gradients to them.

The server calls one method at a time, under the lock of the collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from hvdlite.parameter_server.tensors import TensorSpec


class Gradient(NamedTuple):
    """The gradient of one tensor, as a worker has sent it."""

    tensor: int  # This is the index of the tensor in the storage.
    values: memoryview  # The bytes are C-contiguous.
    # The values belong to these rows, as signed 64-bit integers, each once; a dense gradient has
    # None.
    rows: memoryview | None = None


class Slot(NamedTuple):
    """A copy of something that a checkpoint has of one tensor."""

    tensor: int  # This is the index of the tensor in the storage.
    name: str  # The values have the name ""; else it names a state of the optimizer.
    dtype: str  # The adapter's framework calls the dtype so.
    shape: tuple[int, ...]  # The copy has this shape.
    data: memoryview


class Storage(Protocol):
    """The values of the tensors that one server holds, and their optimizer."""

    def read(self, tensor: int, into: memoryview) -> None:
        """Copy the values of a tensor."""

    def write(self, tensor: int, values: memoryview) -> None:
        """Set the values of a tensor."""

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push; tensors without a gradient stay as they are."""
        # If they cannot be applied, it raises ArgumentError, and nothing has changed.

    def slots(self) -> Iterator[Slot]:
        """Copy all that a checkpoint needs, one by one."""

    def restore(self, slot: Slot) -> None:
        """Set what `slots` has copied."""


# This makes the storage of the tensors that one server holds.
MakeStorage = Callable[[Sequence[TensorSpec]], Storage]
