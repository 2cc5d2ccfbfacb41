"""How two ranks share the one GPU that a test machine has."""

from __future__ import annotations


def shared_gpu(rank: int) -> dict[str, str]:
    """Give what lets NCCL run two ranks on one GPU: to it they are on two hosts, over sockets.

    GPU tensors that pass through the host are errors, so that no test passes by way of that.
    """
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "HVDLITE_REQUIRE_NCCL": "1",
    }
