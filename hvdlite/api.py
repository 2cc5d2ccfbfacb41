"""The names that every adapter (`hvdlite.torch`, `.tensorflow`, `.keras`) re-exports."""

import functools

from hvdlite import _core, basics, errors
from hvdlite import process_sets as sets
from hvdlite.basics import *
from hvdlite.errors import *
from hvdlite.live.observed import observe
from hvdlite.ops import Adasum, Average, Compressor, Max, Min, Product, Sum
from hvdlite.process_sets import *
from hvdlite.rendezvous.environment import EXIT_STOPPED
from hvdlite.stop import stop_on, stop_requested

__all__ = [
    "Adasum",
    "Average",
    "Compressor",
    "EXIT_STOPPED",
    "Max",
    "Min",
    "Product",
    "Sum",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "observe",
    "rocm_built",
    "stop_on",
    "stop_requested",
]
__all__ += basics.__all__
__all__ += errors.__all__
__all__ += sets.__all__


# What this installation and this machine can do, in the words of scripts for Horovod.


def nccl_built() -> bool:
    """Return whether NCCL can carry GPU tensors here; `hvdlite-run --doctor` says why not."""
    return _works("NCCL") and _works("CUDA driver")


def mpi_built() -> bool:
    """Return False: hvdlite has its own data plane and does not use MPI."""
    return False


def gloo_built() -> bool:
    """Return True: collectives run on CPUs without MPI, which is what scripts want to know."""
    return True


def mpi_enabled() -> bool:
    """Return False: no job of hvdlite runs over MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True: every job of hvdlite runs without MPI."""
    return True


def mpi_threads_supported() -> bool:
    """Return True: any thread may submit collectives (the name is Horovod's)."""
    return True


def cuda_built() -> bool:
    """Return whether CUDA tensors can be reduced here: whether there is a driver and a device."""
    return _works("CUDA driver")


def rocm_built() -> bool:
    """Return False: ROCm tensors cannot be reduced."""
    return False


def ccl_built() -> bool:
    """Return False: hvdlite does not use oneCCL."""
    return False


def ddl_built() -> bool:
    """Return False: hvdlite does not use IBM DDL."""
    return False


@functools.cache
def _works(subject: str) -> bool:
    found = _core.gpu_report(basics.nccl_folders())
    return any(works for name, works, _ in found if name == subject)
