"""Virtual ranks in one process of plain torch: it adds up in a balanced tree, by recursion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdlite.torch.virtual.order import seed_all


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors up, whose number is a power of two."""
    half = len(parts) // 2
    return parts[0] if half == 0 else tree(parts[:half]) + tree(parts[half:])


def step(
    model: nn.Module, loss_of: Callable[[Any], torch.Tensor], batches: Sequence[Any], *seeds: int
) -> float:
    """Compute the mean gradients and buffers of a step, and return the mean loss.

    `batches` are those of the virtual ranks, and `seeds` the seed, the epoch and the step.
    """
    before = [one.clone() for one in model.buffers()]
    gradients: dict[nn.Parameter, list[torch.Tensor | None]] = {p: [] for p in model.parameters()}
    buffers: list[list[torch.Tensor]] = [[] for _ in before]
    losses = []
    for virtual_rank, batch in enumerate(batches):
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        model.zero_grad()
        seed_all(*seeds, virtual_rank)
        loss = loss_of(batch)
        loss.backward()
        losses.append(loss.detach().double())
        for param, parts in gradients.items():
            parts.append(param.grad)
        for values, buffer in zip(buffers, model.buffers(), strict=True):
            values.append(buffer.clone())
    for param, parts in gradients.items():
        if any(part is not None for part in parts):
            whole = [torch.zeros_like(param) if part is None else part for part in parts]
            param.grad = tree(whole) / len(parts)
        else:
            param.grad = None
    for buffer, values in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(tree(values) / len(values) if buffer.is_floating_point() else values[0])
    return float(tree(losses) / len(losses))
