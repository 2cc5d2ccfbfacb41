"""hvdlite for PyTorch: `import hvdlite.torch as hvd`.

Example:
    >>> import torch
    >>> import hvdlite.torch as hvd
    >>> hvd.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
"""

import sys

import torch

from hvdlite import api, basics
from hvdlite.api import *
from hvdlite.objects import allgather_object, broadcast_object, join
from hvdlite.torch import collectives, elastic
from hvdlite.torch import parameter_server as parameter_server
from hvdlite.torch.collectives.allreduce import *
from hvdlite.torch.collectives.autograd import Handle, poll, synchronize
from hvdlite.torch.collectives.broadcast import *
from hvdlite.torch.collectives.gather import *
from hvdlite.torch.collectives.sparse import sparse_allreduce_async
from hvdlite.torch.compression import Compression
from hvdlite.torch.data import DistributedSampler
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdlite.torch.late import Late
from hvdlite.torch.local_sgd import DiLoCo, LocalSGD
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.replicas import check_replicas
from hvdlite.torch.sharded import ShardedOptimizer
from hvdlite.torch.sync_batch_norm import SyncBatchNorm
from hvdlite.torch.virtual.sampler import VirtualBatchSampler
from hvdlite_autoload import register

__all__ = [
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "DistributedSampler",
    "Handle",
    "Late",
    "LocalSGD",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "VirtualBatchSampler",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_replicas",
    "elastic",
    "join",
    "poll",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += api.__all__
__all__ += collectives.allreduce.__all__
__all__ += collectives.broadcast.__all__
__all__ += collectives.gather.__all__

# Libraries for Horovod, such as pytorch-ignite, read operations from Horovod's `mpi_ops` module.
mpi_ops = sys.modules[__name__]


def _take_own_gpu() -> None:
    """Make the GPU of `local_rank` the current one, unless the script has chosen one."""
    # PyTorch's default is GPU 0 in every process. All GPUs stay visible, because NCCL reaches the
    # GPUs of its peers best when it sees them, and scripts rely on `local_rank` being an index.
    if not basics.is_initialized():
        return
    own = basics.local_rank() % torch.cuda.device_count()
    if own != 0 and torch.cuda.current_device() == 0:
        torch.cuda.set_device(own)


# A script chooses a GPU by using CUDA before `init`, by `torch.cuda.set_device` at any time, by
# indices as in "cuda:1", or if the process sees one GPU only. torch queues such calls, like its
# seeding, for the moment when it initialises CUDA. A script that uses no GPU never initialises
# CUDA, and gets no context on any GPU. CUDA has a current device per thread: this sets that of the
# thread which uses CUDA first.
if not torch.cuda.is_initialized():
    torch.cuda._lazy_call(_take_own_gpu)

register()  # Releases before 2.5 do not look for backends of torch.distributed.
