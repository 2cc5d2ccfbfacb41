"""What a worker says of its tensors when it registers a model, and which server holds which."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MAX_NAME_BYTES = 1024
MAX_TENSORS = 1 << 20
_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str  # It is a key of `ITEM_BYTES`.
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def encode(specs: Sequence[TensorSpec]) -> list[Any]:
    return [[one.name, one.dtype, list(one.shape)] for one in specs]


def decode(said: Any) -> list[TensorSpec]:
    """Read what `encode` returned, in another process; raise ValueError if it is something else."""
    if not isinstance(said, list) or not 0 < len(said) <= MAX_TENSORS:
        raise ValueError("a collection needs a list of at least one tensor")
    specs = [_decode_one(one) for one in said]
    names = {one.name for one in specs}
    if len(names) < len(specs):
        twice = sorted(name for name in names if sum(one.name == name for one in specs) > 1)
        raise ValueError(f"two tensors have the name {twice[0]!r}")
    return specs


def _decode_one(said: Any) -> TensorSpec:
    if not isinstance(said, list) or len(said) != 3:
        raise ValueError(f"{json.dumps(said)[:80]} does not describe a tensor")
    name, dtype, shape = said
    if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"a name of a tensor has 1 to {MAX_NAME_BYTES} bytes")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} is {dtype}, and servers hold {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError(f"tensor {name!r} has a shape that is not a list of numbers")
    if math.prod(shape) > _MAX_ELEMENTS:
        raise ValueError(f"tensor {name!r} has more than {_MAX_ELEMENTS} elements")
    return TensorSpec(name, dtype, tuple(shape))


def place(specs: Sequence[TensorSpec], servers: int) -> list[int]:
    """Return the server of each tensor; from the largest on, that with the fewest bytes."""
    # Every process computes this from the tensors alone, so nobody has to be told.
    load = [0] * servers
    server_of = [0] * len(specs)
    for index in sorted(range(len(specs)), key=lambda one: (-specs[one].nbytes, one)):
        server_of[index] = load.index(min(load))
        load[server_of[index]] += specs[index].nbytes
    return server_of


def difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """Say how two lists of tensors differ, for a message; None if they are equal."""
    here, there = ({one.name: one for one in some} for some in (ours, theirs))
    for name, one in here.items():
        if name not in there:
            return f"tensor {name!r} is missing there"
        if one != there[name]:
            return f"tensor {name!r} is {one} here and {there[name]} there"
    for name in there:
        if name not in here:
            return f"tensor {name!r} is missing here"
    return None if list(ours) == list(theirs) else "the tensors are the same, in another order"


class Gradient(NamedTuple):
    tensor: int  # its index in the storage
    values: memoryview  # C-contiguous bytes
    rows: memoryview | None = None  # their numbers, 64-bit integers, each once; None: all rows


class Slot(NamedTuple):
    """A copy of something that a checkpoint has of one tensor."""

    tensor: int  # its index in the storage
    name: str  # "" for the values; else it names a state of the optimizer
    dtype: str  # as the adapter's framework calls it
    shape: tuple[int, ...]
    data: memoryview


class Storage(Protocol):
    """What a server asks of an adapter: to hold the values of tensors, and apply gradients to them.

    The server calls one method at a time, under the lock of the collection.
    """

    def read(self, tensor: int, into: memoryview) -> None:
        """Copy the values of a tensor into memory."""

    def write(self, tensor: int, values: memoryview) -> None:
        """Set the values of a tensor."""

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push; tensors without a gradient stay as they are.

        If they cannot be applied, it raises ArgumentError, and nothing has changed.
        """

    def slots(self) -> Iterator[Slot]:
        """Copy all that a checkpoint needs, one by one."""

    def restore(self, slot: Slot) -> None:
        """Set what `slots` has copied."""


# makes the storage of the tensors that one server holds
MakeStorage = Callable[[Sequence[TensorSpec]], Storage]
