"""The program that measures an all-reduce between its ranks; rank 0 prints one line of JSON.

`hvdlite-run --doctor` starts it as `python -m hvdlite.launch.command.probe`. It needs no framework:
its tensors are plain memory.
"""

from __future__ import annotations

import ctypes
import json
import time

from hvdlite import _core, basics

_LARGE = 64 << 20  # bytes
_SMALL = 4 << 10
_LARGE_ROUNDS = 5
_SMALL_ROUNDS = 200


class _Buffer:
    """A tensor of float32 ones, which is reduced in place."""

    def __init__(self, size: int) -> None:
        self._memory = (ctypes.c_float * (size // 4))(1.0)
        address = ctypes.addressof(self._memory)
        dtype = _core.DTYPES["float32"]
        self.tensor = _core.Tensor(f"probe.{size}", dtype, [size // 4], address, address)


def _seconds(size: int, rounds: int) -> float:
    """Return the shortest time, in seconds, of one blocking all-reduce of `size` bytes."""
    buffer = _Buffer(size)
    operation = _core.REDUCE_OPS["average"]
    engine = basics.engine()
    best = float("inf")
    for _ in range(rounds + 1):
        started = time.perf_counter()
        engine.allreduce(
            buffer.tensor.name, [buffer.tensor], operation, keep=buffer, blocking=True
        ).wait()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Measure, and print the result in rank 0."""
    basics.init()
    large, small = _seconds(_LARGE, _LARGE_ROUNDS), _seconds(_SMALL, _SMALL_ROUNDS)
    if basics.rank() == 0:
        print(json.dumps({"large_gb_per_s": _LARGE / large / 1e9, "small_us": small * 1e6}))
    basics.shutdown()


if __name__ == "__main__":
    main()
