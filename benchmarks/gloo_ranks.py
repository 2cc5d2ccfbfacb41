"""torch.distributed over gloo on ranks that hvdlite-run started, for comparisons."""

from __future__ import annotations

import torch
import torch.distributed as gloo


def join_gloo(store: str, rank: int, size: int, with_nccl: bool = False) -> None:
    """Connect this rank to torch.distributed's gloo group of the same ranks, over loopback."""
    # The ranks meet through the file `store`. With `with_nccl`, GPU tensors travel by NCCL.
    backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
    gloo.init_process_group(backend, store=gloo.FileStore(store, size), rank=rank, world_size=size)


def slowest(microseconds: list[float]) -> list[float]:
    """Return the maximum over ranks of each figure: a collective is as fast as its slowest rank."""
    figures = torch.tensor(microseconds, dtype=torch.float64)
    gloo.all_reduce(figures, op=gloo.ReduceOp.MAX)
    return [float(figure) for figure in figures]
