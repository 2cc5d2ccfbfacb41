"""What a server asks of an adapter: to hold the values of parts, and to apply gradients to them.

The server calls one method at a time, under the lock of the collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from hvdlite.parameter_server.placement import Part


class Gradient(NamedTuple):
    """The gradient of one part, as a worker has sent it.

    Attributes:
        part: the index of the part in the storage.
        values: its bytes, C-contiguous.
        rows: the numbers of the rows, in the whole tensor and as signed 64-bit integers, to which
            the values belong; None if the gradient is dense. No number comes twice.
    """

    part: int
    values: memoryview
    rows: memoryview | None = None


class Slot(NamedTuple):
    """A copy of something that a checkpoint has of one part.

    Attributes:
        part: the index of the part in the storage.
        name: "" for the values; else the name of a state of the optimizer.
        dtype: the name of the dtype of the adapter's framework.
        shape: the shape of the copy.
        by_rows: whether row i of the copy belongs to row i of the part; else it is one value for
            the whole part, such as a number of steps.
        data: the bytes.
    """

    part: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    by_rows: bool
    data: memoryview


class Storage(Protocol):
    """The values of the parts that one server holds of one collection, and their optimizer."""

    def read(self, part: int, into: memoryview) -> None:
        """Copy the values of a part."""

    def read_rows(self, part: int, rows: memoryview, into: memoryview) -> None:
        """Copy rows of a part; `rows` has their numbers in the whole tensor.

        Raises:
            ArgumentError: the part does not have one of these rows.
        """

    def write(self, part: int, values: memoryview) -> None:
        """Set the values of a part."""

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push; parts without a gradient stay as they are.

        Raises:
            ArgumentError: they cannot be applied, and nothing has changed.
        """

    def slots(self) -> Iterator[Slot]:
        """Copy all that a checkpoint needs, one by one."""

    def restore(
        self, part: int, name: str, dtype: str, shape: Sequence[int], data: bytearray
    ) -> None:
        """Set what `slots` has copied, of the same part or put together from others."""


# Makes the storage of the parts that one server holds of a collection; the name is for messages.
MakeStorage = Callable[[str, Sequence[Part]], Storage]
