"""The environment with which two ranks share the one GPU of a test machine."""

from __future__ import annotations


def shared_gpu(rank: int) -> dict[str, str]:
    """Return the variables with which NCCL runs two ranks on one GPU.

    They make NCCL take the ranks for two hosts that are connected by sockets. They also make it an
    error if GPU tensors pass through the host, so that no test passes in that way. PyTorch keeps no
    compiled kernels, since it warns if two ranks create the folder for them at the same time.
    """
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "HVDLITE_REQUIRE_NCCL": "1",
        "USE_PYTORCH_KERNEL_CACHE": "0",
    }
