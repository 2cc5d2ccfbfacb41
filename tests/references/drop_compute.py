"""DropCompute in one process: it steps with the micro-batches that a record says were done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Iterator[Any]],
    record: Sequence[Sequence[int]],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    weigh: Callable[[Any], float] = lambda micro: 1.0,
) -> None:
    """Train as the ranks did: `record` has the micro-batches that each rank did in each step."""
    # `optimizer` is a plain one. `loss_of` gives the mean loss of a micro-batch; with `weigh`,
    # which gives its samples, the sum.
    for done in zip(*record, strict=True):
        optimizer.zero_grad()
        micros = [next(data[rank]) for rank, count in enumerate(done) for _ in range(count)]
        total = sum(weigh(micro) for micro in micros)
        for micro in micros:
            (loss_of(model, micro) / total).backward()
        optimizer.step()
