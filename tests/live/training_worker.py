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
from hvdlite.observed import observe


class Gradient:
    """A gradient that is being reduced."""

    def __init__(self, name: str, value: float) -> None:
        self._data = array("f", [value] * 1000)
        address, count = self._data.buffer_info()
        tensor = _core.Tensor(name, _core.DTYPES["float32"], [count], address, address)
        summed = _core.REDUCE_OPS["sum"]
        self._handle = basics.engine().allreduce(name, [tensor], summed, keep=self._data)

    def wait(self) -> float:
        self._handle.wait(60)
        return self._data[0]


def main() -> None:
    stop, late = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    basics.init()
    rank, size = basics.rank(), basics.size()
    steps = ended = 0
    while not ended:
        time.sleep(0.02 + late * (rank == size - 1))
        weight, bias = Gradient("layer.weight", 1.0), Gradient("layer.bias", stop.exists())
        assert weight.wait() == size
        ended = bias.wait() > 0
        observe(samples=16, loss=1 / (1 + steps))
        steps += 1
    basics.shutdown()
    if rank == 0:
        print(steps)


main()
