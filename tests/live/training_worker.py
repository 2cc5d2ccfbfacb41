"""A rank that trains on nothing: two all-reduces a step, until a file exists.

    python training_worker.py FILE [SECONDS]

The last rank is SECONDS late in each step, before its first gradient. Rank 0 prints the number of
its steps.
"""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path

from hvdlite import _core, basics


def reduce(name: str, value: float) -> float:
    data = array("f", [value] * 1000)
    address, count = data.buffer_info()
    tensor = _core.Tensor(name, _core.DTYPES["float32"], [count], address, address)
    basics.engine().allreduce(name, [tensor], _core.REDUCE_OPS["sum"], keep=data).wait(30)
    return data[0]


def main() -> None:
    stop, late = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    basics.init()
    rank = basics.rank()
    last = rank == basics.size() - 1
    steps = 0
    while reduce("ended", stop.exists()) == 0:
        time.sleep(0.02 + late * last)
        for name in ("layer.weight", "layer.bias"):
            assert reduce(name, 1.0) == basics.size()
        steps += 1
    basics.shutdown()
    if rank == 0:
        print(steps)


main()
