"""From torch tensors to the core: every submission of this adapter starts here.

Tensors are checked by the caller (`hvdlite.torch.tensors`) and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite import _core, basics
from hvdlite.process_sets import ProcessSet, global_process_set, member_id


class Reduction(NamedTuple):
    """How an allreduce combines the tensors of the members of a process set."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    weight: float | None = None
    process_set: ProcessSet = global_process_set


def start_allreduce(
    name: str,
    specs: Sequence[_core.Tensor],
    reduction: Reduction,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit tensors that are reduced together."""
    op, prescale, postscale, weight, process_set = reduction
    number = member_id(process_set)
    return basics.engine().allreduce(
        name, specs, op, prescale, postscale, weight, number, keep, blocking
    )


def start_allgather(
    name: str,
    specs: Sequence[_core.Tensor],
    process_set: ProcessSet,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit tensors to be concatenated along their first dimensions; see `take_received`."""
    return basics.engine().allgather(name, specs, member_id(process_set), keep, blocking)


def start_reducescatter(
    name: str,
    specs: Sequence[_core.Tensor],
    reduction: Reduction,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit tensors to be reduced and divided among the ranks; see `take_received`."""
    op, prescale, postscale, _, process_set = reduction
    return basics.engine().reducescatter(
        name, specs, op, prescale, postscale, member_id(process_set), keep, blocking
    )


def start_alltoall(
    name: str,
    tensor: _core.Tensor,
    splits: Sequence[int],
    process_set: ProcessSet,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit a tensor whose rows go to different ranks; see `take_received`."""
    return basics.engine().alltoall(name, tensor, splits, member_id(process_set), keep, blocking)


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
    name: str,
    specs: Sequence[_core.Tensor],
    root_rank: int,
    process_set: ProcessSet,
    keep: object,
    blocking: bool,
) -> _core.Handle:
    """Submit tensors that take the root's values."""
    number = member_id(process_set)
    return basics.engine().broadcast(name, specs, root_rank, number, keep, blocking)
