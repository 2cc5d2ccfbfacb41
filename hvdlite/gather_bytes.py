"""An allgather of plain bytes, for modules that do not import a framework."""

from __future__ import annotations

import ctypes

from hvdlite import _core

_UINT8 = _core.DTYPES["uint8"]


def gather_bytes(
    engine: _core.Engine,
    data: bytes,
    name: str,
    process_set: int = 0,
    timeout: float | None = None,
) -> list[memoryview]:
    """Send this rank's bytes to all members of a process set; return those of every member."""
    # Bytes may be empty, and may have another length on every rank; a rank that has joined gives an
    # empty block. `name` identifies the operation on all ranks, and process set 0 is the world. A
    # member that has not submitted within `timeout` seconds causes a TimeoutError; None waits
    # forever.
    return gather_in_epoch(engine, data, name, process_set, timeout)[0]


def gather_in_epoch(
    engine: _core.Engine,
    data: bytes,
    name: str,
    process_set: int = 0,
    timeout: float | None = None,
) -> tuple[list[memoryview], int]:
    """Do as `gather_bytes`; return the blocks, and the epoch of an elastic job whose ranks sent."""
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    tensor = _core.Tensor(name, _UINT8, [len(data)], address, 0)
    handle = engine.allgather(name, [tensor], process_set, keep=data, blocking=True)
    handle.wait(timeout)
    received = handle.take_output()
    blocks, start = [], 0
    for length in handle.first_dimensions:
        blocks.append(received[start : start + length])
        start += length
    return blocks, handle.epoch
