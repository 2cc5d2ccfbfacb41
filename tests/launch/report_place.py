"""Join whatever world the launcher describes, sum ranks, and print one line about this place."""

from __future__ import annotations

import numpy as np

from faults.arrays import reduce_array
from hvdlite import basics

basics.init()
array = np.full(1000, float(basics.rank()), dtype="float32")
reduce_array(array, "sum of ranks")
place = (basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size())
# One write: several ranks share the launcher's pipe.
print(f"place {basics.rank()} {basics.size()} {array[0]:g} {' '.join(map(str, place))}\n", end="")
basics.shutdown()
