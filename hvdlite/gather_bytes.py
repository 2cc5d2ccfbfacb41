"""Bytes of every rank on every rank, whatever they mean."""

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
    """Give this rank's bytes and return those of all members of a process set, in their order.

    Args:
        engine: of the world.
        data: any number of bytes, none too.
        name: identifies the operation on all ranks.
        process_set: its number; 0 is the world.
        timeout: seconds to wait; for ever unless given.

    Raises:
        TimeoutError: some rank did not come in time.
        HvdliteError: whatever made it fail.
    """
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    tensor = _core.Tensor(name, _UINT8, [len(data)], address, 0)
    handle = engine.allgather(name, [tensor], process_set, keep=data, blocking=True)
    handle.wait(timeout)
    received = handle.take_output()
    blocks, start = [], 0
    for length in handle.first_dimensions:
        blocks.append(received[start : start + length])
        start += length
    return blocks
