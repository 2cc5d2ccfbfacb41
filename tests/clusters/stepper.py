"""A training program: it reduces, step after step, saves its step when told to stop, and goes on.

Its files are in its folder: `saved.RANK` has the step of a rank, and after `enough` exists, 20
more steps are the last ones.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path

from hvdlite import _core, basics, stop
from hvdlite.rendezvous.environment import EXIT_STOPPED


def main() -> None:
    basics.init()
    stop.stop_on()
    rank = basics.rank()
    memory = (ctypes.c_float * 64)(1.0)
    address = ctypes.addressof(memory)
    tensor = _core.Tensor("step", _core.DTYPES["float32"], [64], address, address)

    def reduce(operation: str) -> float:
        handle = basics.engine().allreduce(
            "step", [tensor], _core.REDUCE_OPS[operation], keep=memory
        )
        handle.wait()
        return memory[0]

    saved = Path(f"saved.{rank}")
    first = int(saved.read_text()) if saved.exists() else 0
    where = f"rank {rank} of {basics.size()} on {socket.gethostname()}"
    print(f"epoch {os.environ['HVDLITE_EPOCH']} {where} begins at {first}", flush=True)
    for step in range(first, first + 100_000):
        memory[0] = float(Path("enough").exists())
        if reduce("max") > 0 and step > first + 20:
            print(f"rank {rank} has done enough", flush=True)
            return
        time.sleep(0.01)
        if why := stop.stop_requested():
            saved.write_text(str(step))
            print(f"rank {rank} saved {step} by {why}", flush=True)
            sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
