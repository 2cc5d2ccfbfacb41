"""Where results go: to the tensors of the caller, or to memory from which they are copied there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from hvdlite import _core
from hvdlite.errors import ArgumentError
from hvdlite.torch.distributed.memory import is_plain, units_of
from hvdlite.torch.distributed.work import Finish

# A target is one tensor for all that is received, or a list with a tensor for each rank.
Target: TypeAlias = torch.Tensor | list[torch.Tensor]


class Place(NamedTuple):
    """Plain memory for all that is received for a target."""

    address: int  # The memory begins at this address.
    capacity: int  # This is its size in bytes.
    memory: list[torch.Tensor]  # These tensors keep the memory alive.
    new: torch.Tensor | None  # This is the memory itself if it is not the target's own.


def place_of(verb: str, target: Target, source: torch.Tensor) -> Place:
    """Return memory for what is received for a checked target; raise if the dtypes differ."""
    outputs = target if isinstance(target, list) else [target]
    begin, end, plain = 0, 0, True
    for output in outputs:
        if output.dtype != source.dtype:
            raise ArgumentError(
                f"{verb}: an output is of {output.dtype}, and the input of {source.dtype}; "
                "convert one of them first"
            )
        bytes_here = output.numel() * output.itemsize
        if bytes_here:
            address = output.data_ptr()
            plain = plain and is_plain(output) and end in (0, address)
            begin, end = begin or address, address + bytes_here
    # The tensors lie one behind the other, as the chunks of a tensor do.
    if plain:
        return Place(begin, end - begin, [output.detach() for output in outputs], None)
    elements = sum(output.numel() for output in outputs)
    new = torch.empty(elements, dtype=source.dtype, device="cpu")
    return Place(new.data_ptr(), new.numel() * new.itemsize, [new], new)


def copying(memories: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Finish | None:
    """Return what copies `memories` to those of the targets that have other memory."""
    pairs = [
        (memory, target)
        for memory, target in zip(memories, targets, strict=True)
        if memory.data_ptr() != target.data_ptr()
    ]
    if not pairs:
        return None

    def finish(_: _core.Handle) -> None:
        for memory, target in pairs:
            write(target, memory)

    return finish


def receiving(
    verb: str, targets: Sequence[Target], places: Sequence[Place], members: int
) -> Finish:
    """Return what checks how much an allgather has received, and brings it to its targets."""

    def finish(handle: _core.Handle) -> None:
        dimensions = handle.first_dimensions
        for index, (target, place) in enumerate(zip(targets, places, strict=True)):
            check_received(verb, target, dimensions[index * members : (index + 1) * members])
            deliver(target, place)

    return finish


def check_received(verb: str, target: Target, rows: Sequence[int]) -> None:
    """Raise unless a target has as many elements as have arrived, `rows` engine units by rank."""
    if isinstance(target, list):
        arrived, wanted = list(rows), [one.numel() * units_of(one.dtype) for one in target]
    else:
        arrived, wanted = [sum(rows)], [target.numel() * units_of(target.dtype)]
    if arrived == wanted:
        return
    rank = next(i for i, count in enumerate(arrived) if count != wanted[i])
    one = target[rank] if isinstance(target, list) else target
    raise ArgumentError(
        f"{verb}: {arrived[rank] // units_of(one.dtype)} elements arrived (from rank {rank}, where "
        f"each rank has its own output), and the output has {one.numel()}"
    )


def deliver(target: Target, place: Place) -> None:
    """Copy what has arrived to its target, unless it is there."""
    if place.new is None:
        return
    outputs = target if isinstance(target, list) else [target]
    parts = place.new.split([output.numel() for output in outputs])
    for output, part in zip(outputs, parts, strict=True):
        write(output, part.view(output.shape))


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite a tensor as data: autograd does not look at it."""
    target.data.copy_(values)
