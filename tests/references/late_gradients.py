"""Late gradients in one process: it steps with the gradients that a record names.

A gradient is of the parameters that its rank had in the step in which it began to compute. These
are the parameters after as many results as steps came before, which all ranks take in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Record = Sequence[Sequence[tuple[int, int]]]  # Each step has (rank, step of the gradient).


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    record: Record,
    loss_of: Callable[[Any, int, int], torch.Tensor],
    weight_of: Callable[[int, int], float] = lambda rank, step: 1.0,
) -> None:
    """Train as the ranks did: `record` has the gradients of each step, none from a later step."""
    # `optimizer` is a plain one. `loss_of` takes the model, a rank and a step, and `weight_of`
    # gives the weight of a rank's gradient of a step.
    params = list(model.parameters())
    history: list[list[torch.Tensor]] = []  # Each step begins with these parameters.

    def put(values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)

    for step, included in enumerate(record):
        history.append([param.detach().clone() for param in params])
        total = sum(weight_of(*one) for one in included)
        sums = [torch.zeros_like(param) for param in params]
        for rank, origin in included:
            put(history[origin])
            share = weight_of(rank, origin) / total
            gradients = torch.autograd.grad(share * loss_of(model, rank, origin), params)
            for one, gradient in zip(sums, gradients, strict=True):
                one += gradient
        put(history[step])
        for param, one in zip(params, sums, strict=True):
            param.grad = one if included else None
        optimizer.step()
