"""Say what this installation and this machine can do, in the words of scripts for Horovod.

Example:
    >>> gloo_built(), mpi_built()
    (True, False)
"""

from __future__ import annotations

from hvdlite import gpu


def nccl_built() -> bool:
    """Return whether NCCL can carry GPU tensors here; `hvdlite-run --doctor` says why not."""
    return gpu.works("NCCL") and gpu.works("CUDA driver")


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
    return gpu.works("CUDA driver")


def rocm_built() -> bool:
    """Return False: ROCm tensors cannot be reduced."""
    return False


def ccl_built() -> bool:
    """Return False: hvdlite does not use oneCCL."""
    return False


def ddl_built() -> bool:
    """Return False: hvdlite does not use IBM DDL."""
    return False
