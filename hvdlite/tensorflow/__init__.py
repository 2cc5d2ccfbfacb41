"""hvdlite for TensorFlow: `import hvdlite.tensorflow as hvd`.

Example:
    >>> import tensorflow as tf
    >>> import hvdlite.tensorflow as hvd
    >>> hvd.init()
    >>> variable = tf.Variable([1.0, 2.0])
    >>> hvd.broadcast_variables([variable], root_rank=0)
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(variable**2)
    >>> gradients = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
"""

import importlib
from typing import Any

from hvdlite.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlite.compression import Compressor
from hvdlite.errors import (
    ArgumentError,
    BootstrapError,
    CollectiveError,
    CollectiveTimeoutError,
    DuplicateNameError,
    ForkedError,
    HorovodInternalError,
    HvdliteError,
    MismatchError,
    NotInitializedError,
    OutOfMemoryError,
    RankFailedError,
    ShutdownError,
    StalledError,
)
from hvdlite.ops import Adasum, Average, Max, Min, Product, Sum
from hvdlite.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_by_id,
    process_sets,
    remove_process_set,
)
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
)
from hvdlite.tensorflow.gradient_tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from hvdlite.tensorflow.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
)
from hvdlite.tensorflow.ops import (
    allreduce,
    barrier,
    broadcast,
    cross_rank_op,
    cross_size_op,
    grouped_allreduce,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdlite.tensorflow.optimizer import DistributedOptimizer
from hvdlite.tensorflow.rows import (
    allgather,
    alltoall,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "BootstrapError",
    "BroadcastGlobalVariablesHook",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DuplicateNameError",
    "ForkedError",
    "HorovodInternalError",
    "HvdliteError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "OutOfMemoryError",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "ShutdownError",
    "StalledError",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_rank_op",
    "cross_size",
    "cross_size_op",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_by_id",
    "process_set_included_op",
    "process_sets",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

# These import Keras, and are looked up at first use: TensorFlow alone does without.
_LATER = {
    "PartialDistributedOptimizer": "hvdlite.keras",
    "SyncBatchNormalization": "hvdlite.tensorflow.sync_batch_norm",
}


def __getattr__(name: str) -> Any:
    """Import what needs Keras when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
