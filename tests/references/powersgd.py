"""PowerSGD in one process that simulates all ranks, with torch's QR and plain products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Loss = Callable[[Any, int, int], torch.Tensor]  # The model has it in a step, on a rank.


def train(
    model: Any,
    optimizer: Any,
    loss_of: Loss,
    steps: Iterable[int],
    compression: Any,
    weights: Callable[[int], Sequence[float]],
) -> None:
    """Train; `weights` gives the ranks' weights in the mean of a step."""
    errors: dict[tuple[Any, int], Any] = {}
    bases: dict[Any, torch.Tensor] = {}
    for step in steps:
        shares = [weight / sum(weights(step)) for weight in weights(step)]
        gradients: list[list[torch.Tensor]] = []
        for rank in range(len(shares)):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            gradients.append([param.grad.clone() for param in model.parameters()])
        for param, *parts in zip(model.parameters(), *gradients, strict=True):
            rank = min(compression.rank, *param.shape) if param.dim() == 2 else 0
            gain = param.numel() / (rank * sum(param.shape)) if rank else 0.0
            if step < compression.start or gain < compression.least_gain:
                param.grad = _mean(parts, shares)
                continue
            if param not in bases:
                seed = torch.Generator().manual_seed(0)
                bases[param] = torch.randn(rank, param.shape[1], generator=seed).to(param.dtype)
            wholes = [part + errors.get((param, i), 0.0) for i, part in enumerate(parts)]
            left = torch.linalg.qr(_mean([whole @ bases[param].t() for whole in wholes], shares)).Q
            bases[param] = _mean([left.t() @ whole for whole in wholes], shares)
            param.grad = left @ bases[param]
            for i, whole in enumerate(wholes):
                if shares[i] > 0:
                    errors[param, i] = whole - left @ (left.t() @ whole)
        optimizer.step()


def _mean(parts: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)
