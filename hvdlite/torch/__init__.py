"""hvdlite for PyTorch: `import hvdlite.torch as hvd`.

Example:
    >>> import torch
    >>> import hvdlite.torch as hvd
    >>> hvd.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
"""

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
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.ops import Adasum, Average, Max, Min, Product, Sum
from hvdlite.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_by_id,
    process_sets,
    remove_process_set,
)
from hvdlite.torch.compression import Compression
from hvdlite.torch.device import take_own_gpu
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdlite.torch.handle import Handle, poll, synchronize
from hvdlite.torch.ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdlite.torch.sparse import sparse_allreduce_async
from hvdlite.torch.sync_batch_norm import SyncBatchNorm
from hvdlite.uneven import join

__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "BootstrapError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "DuplicateNameError",
    "ForkedError",
    "Handle",
    "HorovodInternalError",
    "HvdliteError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "OutOfMemoryError",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "ShutdownError",
    "StalledError",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_by_id",
    "process_sets",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

take_own_gpu()
