"""Copies results from where the engine has put them to the tensors of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from hvdlite import _core
from hvdlite.errors import ArgumentError
from hvdlite.torch.distributed.memory import units_of
from hvdlite.torch.distributed.work import Finish

# One tensor for all that is received, or a list with a tensor for each rank.
Target: TypeAlias = torch.Tensor | list[torch.Tensor]


def copying(memories: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Finish | None:
    """Return what copies `memories` to those of the targets that have other memory."""
    pairs = [
        (memory, target)
        for memory, target in zip(memories, targets, strict=True)
        if memory.data_ptr() != target.data_ptr()
    ]

    def finish(_: _core.Handle) -> None:
        for memory, target in pairs:
            write(target, memory)

    return finish if pairs else None


def receiving(verb: str, targets: Sequence[Target], members: int) -> Finish:
    """Return what copies the received outputs of an operation to its targets."""

    def finish(handle: _core.Handle) -> None:
        dimensions = handle.first_dimensions
        for index, target in enumerate(targets):
            rows = dimensions[index * members : (index + 1) * members]
            deliver(verb, handle, index, target, rows)

    return finish


def deliver(
    verb: str, handle: _core.Handle, index: int, target: Target, rows: Sequence[int]
) -> None:
    """Copy one received output to its target; `rows` has the engine's elements from each rank."""
    one = target[0] if isinstance(target, list) else target
    received = _take(handle, index, one.dtype)
    if isinstance(target, list):
        units = units_of(one.dtype)
        parts = list(received.split([count // units for count in rows]))
    else:
        target, parts = [target], [received]
    for rank, (wanted, part) in enumerate(zip(target, parts, strict=True)):
        if wanted.numel() != part.numel():
            raise ArgumentError(
                f"{verb}: {part.numel()} elements arrived (from rank {rank}, where each rank has "
                f"its own output), and the output has {wanted.numel()}"
            )
        write(wanted, part.view(wanted.shape))


def _take(handle: _core.Handle, index: int, dtype: torch.dtype) -> torch.Tensor:
    data = handle.take_output(index)
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype)


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite a tensor as data: autograd does not look at it."""
    target.data.copy_(values)
