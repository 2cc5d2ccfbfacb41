"""Bitwise reductions of whole numbers, for which the engine has no arithmetic.

Every rank gathers what all ranks have, and combines it: that moves more bytes than a sum does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from hvdlite import _core
from hvdlite.torch.distributed.memory import spec

_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# PyTorch has no bitwise arithmetic for some unsigned numbers.
_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_bitwise(op: Any, dtype: torch.dtype) -> bool:
    """Return whether an operation combines the bits of this dtype; the engine has it for bool."""
    kind = _kind(op)
    if kind not in _COMBINE or dtype.is_floating_point or dtype.is_complex:
        return False
    return dtype != torch.bool or bool(kind == ReduceOp.BXOR)


def _kind(op: Any) -> Any:
    return op.op if isinstance(op, ReduceOp) else op


class Gathered:
    """Memory for the same plain tensors of all ranks, and the bitwise operation on them."""

    def __init__(self, op: Any, sources: Sequence[torch.Tensor], members: int) -> None:
        self.word = f"{_kind(op)}.{sources[0].dtype}"
        self._combine = _COMBINE[_kind(op)]
        self._sources = sources
        self._all = [source.new_empty(members, source.numel()) for source in sources]

    def specs(self, name: str) -> list[_core.Tensor]:
        """Describe the tensors to the engine, for an all-gather."""
        return [
            spec(f"{name}.{index}", source, whole.data_ptr(), whole.nbytes)
            for index, (source, whole) in enumerate(zip(self._sources, self._all, strict=True))
        ]

    def combine_into(self, memory: torch.Tensor, index: int, begin: int) -> None:
        """Combine what has arrived for a tensor from element `begin` on into plain memory."""
        number = _AS[memory.itemsize]
        part = self._all[index][:, begin : begin + memory.numel()].view(number)
        memory.view(-1).view(number).copy_(functools.reduce(self._combine, part))
