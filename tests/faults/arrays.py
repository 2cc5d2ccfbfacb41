"""Collectives on numpy arrays, by calls of the core, for tests whose ranks load no framework.

The functions of this file run in ranks. Arrays are reduced in place.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvdlite import _core, basics
from hvdlite.errors import HvdliteError
from patience import HANG, Stopwatch

Array: TypeAlias = "NDArray[Any]"


def ones(count: int = 1024, dtype: str = "float32") -> Array:
    """Make an array of this rank's number plus one."""
    return np.full(count, basics.rank() + 1, dtype=dtype)


def total_of_ones() -> int:
    """Return the elements of `ones()` after a sum over all ranks."""
    return sum(range(1, basics.size() + 1))


def submit(array: Array, name: str, op: str = "sum", process_set: int = 0) -> _core.Handle:
    """Start reducing an array in place."""
    address = array.ctypes.data
    tensor = _core.Tensor(name, _core.DTYPES[array.dtype.name], array.shape, address, address)
    number = _core.REDUCE_OPS[op]
    return basics.engine().allreduce(name, [tensor], number, process_set=process_set, keep=array)


def reduce_array(array: Array, name: str, op: str = "sum") -> Array:
    """Reduce an array in place, and wait."""
    submit(array, name, op).wait()
    return array


def works(name: str = "still.usable") -> bool:
    """Return whether the world computes a right sum."""
    return bool((reduce_array(ones(), name) == total_of_ones()).all())


def describe(error: HvdliteError) -> dict[str, Any]:
    """Return the facts of an error, and a watch that started when it was seen, for the test."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "rank": error.failed_rank,
        "seen": Stopwatch(),
    }


def reduce_until_error(name: str, count: int = 1 << 18) -> dict[str, Any]:
    """Reduce one tensor over and over until that fails; return the error, as `describe` does."""
    gradient = ones(count)
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        try:
            reduce_array(gradient, name)
        except HvdliteError as error:
            return describe(error)
    raise AssertionError(f"{HANG:.0f} s went by and nothing failed")


def note_time(path: str) -> None:
    """Write a watch that starts now to a file; it counts the same in all processes."""
    half = Path(path + ".half")
    half.write_bytes(pickle.dumps(Stopwatch()))
    half.replace(path)


def noted_time(path: Path) -> Stopwatch:
    """Return the watch that a process has written."""
    watch: Stopwatch = pickle.loads(path.read_bytes())
    return watch


def seconds_between(first: Stopwatch, then: Stopwatch) -> float:
    """Return the seconds between the starts of two watches; negative if `then` is the older one."""
    return first.seconds() - then.seconds()


def die(path: str) -> NoReturn:
    """Note the time and die of SIGKILL at once."""
    note_time(path)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")
