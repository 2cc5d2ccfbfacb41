"""Reductions for which every rank gathers what all ranks have, and combines it itself.

They are sums of sparse tensors, and bitwise operations, for which the engine has no arithmetic.
Ranks may have any number of sparse rows, so those results have new memory, and the tensors of the
caller take it over, as they do with gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from hvdlite import _core
from hvdlite.errors import UnsupportedError
from hvdlite.torch.collectives.sparse import is_sparse
from hvdlite.torch.collectives.tensors import NUMBER_OF, readable
from hvdlite.torch.distributed.memory import counts, one_dtype, spec
from hvdlite.torch.distributed.work import Finish

# Torch adds up the rows, and has no arithmetic for the other dtypes. A sum of bools means "or".
_SUMMED = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bool, torch.complex64, torch.complex128),
    }
)


def are_sparse(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and all(is_sparse(tensor) and tensor.is_cpu for tensor in tensors)


class SparseSum:
    """The rows of COO tensors that this rank sends, and what becomes of those of all ranks."""

    def __init__(self, op: Any, targets: Sequence[torch.Tensor]) -> None:
        kind = _kind(op)
        for target in targets:
            if kind != ReduceOp.SUM or target.dtype not in _SUMMED:
                raise UnsupportedError(
                    "allreduce: the backend 'hvdlite' of torch.distributed does not compute "
                    f"{str(kind).removeprefix('RedOpType.')} of sparse tensors of {target.dtype}: "
                    "it has SUM, of numbers whose rows torch adds up; divide the sum for an "
                    "average, and else reduce .to_dense()"
                )
        self._targets = targets
        rows = [target.detach().coalesce() for target in targets]
        # Rows come first, so that ranks may have different numbers of them.
        self._indices = [one.indices().t().contiguous() for one in rows]
        self._values = [readable(one.values()) for one in rows]
        forms = [
            f"{one.dtype}.{'x'.join(map(str, one.shape))}.{one.sparse_dim()}" for one in targets
        ]
        self.signature = f"allreduce.sparse.{'+'.join(forms)}"

    def specs(self, name: str) -> list[_core.Tensor]:
        parts = [part for pair in zip(self._indices, self._values, strict=True) for part in pair]
        return [
            _core.Tensor(
                f"{name}.{index}", NUMBER_OF[part.dtype], tuple(part.shape), part.data_ptr(), 0
            )
            for index, part in enumerate(parts)
        ]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def finish(self, handle: _core.Handle) -> None:
        total = handle.first_dimensions
        members = len(total) // (2 * len(self._targets))
        for index, target in enumerate(self._targets):
            rows = sum(total[2 * index * members : (2 * index + 1) * members])
            indices = _taken(handle, 2 * index, rows, self._indices[index])
            values = _taken(handle, 2 * index + 1, rows, self._values[index])
            _give(target, indices.t(), values)


def _taken(handle: _core.Handle, index: int, rows: int, like: torch.Tensor) -> torch.Tensor:
    data, shape = handle.take_output(index), (rows, *like.shape[1:])
    if len(data) == 0:
        return like.new_empty(shape)
    return torch.frombuffer(data, dtype=like.dtype).view(shape)


def _give(target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    # Torch gives numbers for complex ones; but a sparse view does not follow when rows are added.
    base = target._base
    if base is not None and base.is_complex() and not target.is_complex():
        target, values = base, torch.view_as_complex(values)
    result = torch.sparse_coo_tensor(
        indices, values, target.shape, device="cpu", check_invariants=False
    )
    target.copy_(result.coalesce())


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


class BitwiseReduction:
    """The same plain tensors of all ranks, and the bitwise operation that combines them."""

    def __init__(
        self,
        verb: str,
        op: Any,
        members: int,
        sources: Sequence[torch.Tensor],
        memories: Sequence[torch.Tensor],
        begins: Sequence[int],
        copy: Finish | None,
    ) -> None:
        """Combine `sources` into plain memory, each from an element on; call `copy` afterwards."""
        dtype = one_dtype(verb, [*sources, *memories])
        self.signature = f"{verb}.{_kind(op)}.{dtype}.{counts(sources)}"
        self._combine = _COMBINE[_kind(op)]
        self._sources = sources
        self._all = [source.new_empty(members, source.numel()) for source in sources]
        self._parts = list(zip(memories, begins, self._all, strict=True))
        self._copy = copy

    def specs(self, name: str) -> list[_core.Tensor]:
        return [
            spec(f"{name}.{index}", source, whole.data_ptr(), whole.nbytes)
            for index, (source, whole) in enumerate(zip(self._sources, self._all, strict=True))
        ]

    def finish(self, handle: _core.Handle) -> None:
        for memory, begin, whole in self._parts:
            number = _AS[memory.itemsize]
            part = whole[:, begin : begin + memory.numel()].view(number)
            memory.view(-1).view(number).copy_(functools.reduce(self._combine, part))
        if self._copy is not None:
            self._copy(handle)
