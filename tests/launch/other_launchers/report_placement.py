"""A program for tests of launchers: each rank sums all ranks, and prints its placement in one line.

The line is "placement RANK SIZE SUM LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE".
"""

from __future__ import annotations

import numpy as np

from faults.arrays import reduce_array
from hvdlite import basics

basics.init()
array = np.full(1000, float(basics.rank()), dtype="float32")
reduce_array(array, "sum of ranks")
placement = (basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size())
line = f"placement {basics.rank()} {basics.size()} {array[0]:g} {' '.join(map(str, placement))}\n"
# The ranks share the launcher's pipe, so each line must be a single write.
print(line, end="")
basics.shutdown()
