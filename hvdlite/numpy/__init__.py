"""hvdlite for NumPy arrays and numbers, without any framework: `import hvdlite.numpy as hvd`.

For metrics, for scikit-learn, for simulations: wherever several processes compute and have to
agree on something.

Example:
    >>> import numpy as np
    >>> import hvdlite.numpy as hvd
    >>> hvd.init()
    >>> mean = hvd.allreduce(3.0)
    >>> total = hvd.allreduce(np.ones(5), op=hvd.Sum)
    >>> every_row = hvd.allgather(np.ones((hvd.rank() + 1, 2)))
"""

from hvdlite import api
from hvdlite.api import *
from hvdlite.numpy.collectives import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allreduce,
    reducescatter,
)
from hvdlite.objects import allgather_object, broadcast_object, join

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "grouped_allreduce",
    "join",
    "reducescatter",
]
__all__ += api.__all__
