"""From torch tensors to the core: every submission of this adapter starts here.

Tensors are checked by the caller (`hvdlite.torch.tensors`) and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite import _core, basics


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


def start_allgather(
    name: str, specs: Sequence[_core.Tensor], keep: object, blocking: bool
) -> _core.Handle:
    """Submit tensors to be concatenated along their first dimensions; see `take_received`."""
    return basics.engine().allgather(name, specs, keep=keep, blocking=blocking)


def start_reducescatter(
    name: str,
    specs: Sequence[_core.Tensor],
    reduction: Reduction,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit tensors to be reduced and divided among the ranks; see `take_received`."""
    op, prescale, postscale, _ = reduction
    return basics.engine().reducescatter(
        name, specs, op, prescale, postscale, keep=keep, blocking=blocking
    )


def start_alltoall(
    name: str, tensor: _core.Tensor, splits: Sequence[int], keep: object, blocking: bool
) -> _core.Handle:
    """Submit a tensor whose rows go to different ranks; see `take_received`."""
    return basics.engine().alltoall(name, tensor, splits, keep=keep, blocking=blocking)


class Received(NamedTuple):
    """What a completed collective brought for one tensor."""

    tensor: torch.Tensor
    rows: list[int]  # of which parts the tensor consists


def take_received(handle: _core.Handle, sources: Sequence[torch.Tensor]) -> list[Received]:
    """Make tensors over the memory that a completed collective received; nothing is copied.

    Args:
        handle: of an allgather, a reducescatter or an alltoall.
        sources: the tensors that were submitted.
    """
    dimensions = handle.first_dimensions
    parts = len(dimensions) // max(len(sources), 1)
    received = []
    for index, source in enumerate(sources):
        rows = dimensions[index * parts : (index + 1) * parts]
        data = handle.take_output(index)
        shape = [sum(rows), *source.shape[1:]]
        if len(data) == 0:
            received.append(Received(torch.empty(shape, dtype=source.dtype), rows))
        else:
            tensor = torch.frombuffer(data, dtype=source.dtype).view(shape)
            received.append(Received(tensor, rows))
    return received


def start_broadcast(
    name: str, specs: Sequence[_core.Tensor], root_rank: int, keep: object, blocking: bool
) -> _core.Handle:
    """Submit tensors that take the root's values."""
    return basics.engine().broadcast(name, specs, root_rank, keep=keep, blocking=blocking)
