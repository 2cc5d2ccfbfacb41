"""How NumPy arrays are handed to the core, and how its results become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import _core, ops
from hvdlite.errors import ArgumentError
from hvdlite.ops import travels_as


def copied(value: Any, name: str) -> Any:
    """Copy a number or an array: contiguous, in native byte order; refuse Python objects."""
    array = np.array(value, order="C")
    if array.dtype.hasobject:
        raise ArgumentError(
            f"'{name}': a {type(value).__name__} of dtype {array.dtype} cannot be sent; send "
            "numbers, or Python objects with allgather_object and broadcast_object"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def as_given(array: Any, value: Any) -> Any:
    """Return the result for `value`: a NumPy number for a number, otherwise the array."""
    return array if array.ndim or isinstance(value, np.ndarray) else array[()]


def spec(name: str, source: Any, target: Any = None, cast: int | None = None) -> _core.Tensor:
    """Describe an array to the core; without a `target` the engine allocates the result."""
    # `cast` is a 16-bit float of the core, to which an allreduce casts the array on the way.
    number = ops.dtype_number(source.dtype.name, name)
    output = 0 if target is None else target.ctypes.data
    wire = travels_as(cast, source.dtype.name)
    return _core.Tensor(name, number, source.shape, source.ctypes.data, output, wire=wire)


def moved_as(array: Any) -> Any:
    """Return an array that is only moved: a dtype unknown to the core becomes bytes."""
    if array.dtype.name in _core.DTYPES:
        return array
    if array.dtype.itemsize == 0:
        raise ArgumentError(f"an array of dtype {array.dtype} has no bytes to send")
    # The bytes of one element are a new last dimension, so that rows stay rows.
    return array.reshape(*array.shape, 1).view(np.uint8)


def received(handle: _core.Handle, sent: Any) -> tuple[Any, Sequence[int]]:
    """Wait; return the received rows with the dtype of those sent, and how many each rank sent."""
    handle.wait()
    rows = handle.first_dimensions
    output = np.frombuffer(handle.take_output(), sent.dtype)
    return output.reshape(sum(rows), *sent.shape[1:]), rows
