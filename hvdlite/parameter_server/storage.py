"""What a server asks of an adapter: to hold the values of parts, and to apply gradients to them.

The server calls one method at a time, under the lock of the collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from hvdlite.parameter_server.placement import Part


class Gradient(NamedTuple):
    """The gradient of one part, as a worker has sent it."""

    part: int  # This is the index of the part in the storage.
    values: memoryview  # The bytes are C-contiguous.
    # The values belong to these rows of the whole tensor, as signed 64-bit integers, each once; a
    # dense gradient has None.
    rows: memoryview | None = None


class Slot(NamedTuple):
    """A copy of something that a checkpoint has of one part."""

    part: int  # This is the index of the part in the storage.
    name: str  # The values have the name ""; else it names a state of the optimizer.
    dtype: str  # The adapter's framework calls the dtype so.
    shape: tuple[int, ...]  # The copy has this shape.
    # Row i of the copy belongs to row i of the part; else the copy is one value for the whole part,
    # such as a number of steps.
    by_rows: bool
    data: memoryview


class Storage(Protocol):
    """The values of the parts that one server holds of one collection, and their optimizer."""

    def read(self, part: int, into: memoryview) -> None:
        """Copy the values of a part."""

    def write(self, part: int, values: memoryview) -> None:
        """Set the values of a part."""

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push; parts without a gradient stay as they are."""
        # If they cannot be applied, it raises ArgumentError, and nothing has changed.

    def slots(self) -> Iterator[Slot]:
        """Copy all that a checkpoint needs, one by one."""

    def restore(
        self, part: int, name: str, dtype: str, shape: Sequence[int], data: bytearray
    ) -> None:
        """Set what `slots` has copied, of the same part or put together from others."""


# This makes the storage of the parts that one server holds of a collection; messages have the name.
MakeStorage = Callable[[str, Sequence[Part]], Storage]
