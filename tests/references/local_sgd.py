"""Local SGD with an outer optimizer, as one process that simulates all ranks.

d = mean over ranks of (anchor - parameter)
momentum = mu * momentum + d
anchor = anchor - eta * (d + mu * momentum)
parameter = anchor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def train(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    loss_of: Callable[[Any, int, int], torch.Tensor],
    steps: int,
    mean: Callable[[list[torch.Tensor]], torch.Tensor],
    every: int,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
) -> None:
    """Train the replicas in place; `loss_of` takes a model, the rank and the step."""
    replicas = [list(model.parameters()) for model in models]
    anchors = [param.detach().clone() for param in replicas[0]]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if step % every:
            continue
        for i, anchor in enumerate(anchors):
            d = mean([anchor - params[i].detach() for params in replicas])
            if outer_momentum:
                momenta[i] = outer_momentum * momenta[i] + d
                d = d + outer_momentum * momenta[i]
            anchors[i] = anchor - outer_lr * d
            for params in replicas:
                params[i].data = anchors[i].clone()
