"""From torch tensors to the core: every submission of this adapter starts here.

Tensors are checked by the caller (`hvdlite.torch.tensors`) and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite import _core, basics
from hvdlite.torch.tensors import spec


class Reduction(NamedTuple):
    """How an allreduce combines the ranks' tensors."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    weight: float | None = None


def start_allreduce(
    name: str,
    specs: Sequence[_core.Tensor],
    reduction: Reduction,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit tensors that are reduced together."""
    op, prescale, postscale, weight = reduction
    return basics.engine().allreduce(
        name, specs, op, prescale, postscale, weight, keep=keep, blocking=blocking
    )


def start_allgather(name: str, tensor: torch.Tensor, blocking: bool) -> _core.Handle:
    """Submit a tensor to be concatenated along its first dimension."""
    return basics.engine().allgather(name, spec(name, tensor, None), keep=tensor, blocking=blocking)


def take_gathered(handle: _core.Handle, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor over the memory that a completed allgather received; nothing is copied."""
    data = handle.take_output()
    shape = [sum(handle.first_dimensions), *like.shape[1:]]
    if len(data) == 0:
        return torch.empty(shape, dtype=like.dtype)
    return torch.frombuffer(data, dtype=like.dtype).view(shape)


def start_broadcast(
    name: str, specs: Sequence[_core.Tensor], root_rank: int, keep: object, blocking: bool
) -> _core.Handle:
    """Submit tensors that take the root's values."""
    return basics.engine().broadcast(name, specs, root_rank, keep=keep, blocking=blocking)
