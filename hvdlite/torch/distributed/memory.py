"""Tensors as the engine takes them: checked, contiguous, of one dimension; and where results go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from hvdlite import _core
from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.torch.collectives.tensors import NUMBER_OF, lies_otherwise, readable
from hvdlite.torch.distributed.work import Finish

_BYTE = _core.DTYPES["uint8"]
_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
    ReduceOp.PREMUL_SUM: "sum",
}
# A bool is a byte that is 0 or 1. Its sum means "or", as with NCCL.
_OPS_OF_BOOL = {
    ReduceOp.SUM: "max",
    ReduceOp.MAX: "max",
    ReduceOp.BOR: "max",
    ReduceOp.MIN: "min",
    ReduceOp.BAND: "min",
    ReduceOp.PRODUCT: "min",
}
_PREMUL_SUM = int(ReduceOp.PREMUL_SUM)
_REDUCIBLE = frozenset(number for name, number in _core.DTYPES.items() if name in _core.REDUCIBLE)


class OtherDeviceError(UnsupportedError):
    def __init__(self, verb: str, device: torch.device) -> None:
        super().__init__(
            f"{verb}: a tensor is on {device}, and the backend 'hvdlite' of torch.distributed "
            'carries CPU tensors; for both, init_process_group("cuda:nccl,cpu:hvdlite")'
        )
        self.device = device


def check(verb: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if a tensor is not in host memory (OtherDeviceError) or sparse (UnsupportedError)."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise OtherDeviceError(verb, tensor.device)
        if tensor.layout != torch.strided:
            raise UnsupportedError(
                f"{verb}: a tensor has the layout {tensor.layout}, and the backend 'hvdlite' "
                "carries dense tensors, and sparse (COO) ones in all_reduce alone; use .to_dense()"
            )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a checked tensor is its values, one behind the other."""
    return tensor.is_contiguous() and not lies_otherwise(tensor)


def as_written(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a result: the tensor's own, or, if that is not plain, a copy of it."""
    return tensor.detach() if is_plain(tensor) else readable(tensor)


def units_of(dtype: torch.dtype) -> int:
    """Return as how many elements one element travels in an operation that copies."""
    # Elements of a dtype that the engine does not know, such as complex numbers, travel as bytes.
    return 1 if dtype in NUMBER_OF else dtype.itemsize


def spec(name: str, source: torch.Tensor, output: int = 0, capacity: int = 0) -> _core.Tensor:
    """Describe a plain tensor, or as much memory, to the engine, for an operation that copies."""
    # The operation writes to the address `output`. If that memory has another size than `source`,
    # `capacity` is how many bytes fit there.
    number = NUMBER_OF.get(source.dtype, _BYTE)
    count = source.numel() * units_of(source.dtype)
    return _core.Tensor(name, number, (count,), source.data_ptr(), output, capacity=capacity)


class Reduction(NamedTuple):
    op: int
    prescale: float
    number: int  # the engine's dtype
    word: str  # Names of operations contain it.


def reduction_of(verb: str, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> Reduction:
    """Return how the engine reduces tensors of one dtype, or raise an UnsupportedError."""
    dtype, kind = one_dtype(verb, tensors), kind_of(op)
    number = int(kind)  # The hash of a number is quicker than that of a ReduceOp.
    found = _found(number, dtype)
    if found is None:
        raise UnsupportedError(
            f"{verb}: the backend 'hvdlite' of torch.distributed does not compute "
            f"{str(kind).removeprefix('RedOpType.')} of {dtype}; use torch's gloo for such "
            'tensors, in a group dist.new_group(backend="gloo") (without --replace-gloo)'
        )
    if number != _PREMUL_SUM:
        return found
    factor = _factor(verb, op)
    return found._replace(prescale=factor, word=f"{found.word}.{factor}")


def kind_of(op: Any) -> Any:
    return op.op if isinstance(op, ReduceOp) else op


def one_dtype(verb: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise ArgumentError(
                f"{verb}: the tensors of one call have to be of one dtype; got {dtype} and "
                f"{tensor.dtype}"
            )
    return dtype


def counts(tensors: Sequence[torch.Tensor]) -> str:
    return "+".join(str(tensor.numel()) for tensor in tensors)


@functools.cache
def _found(op: int, dtype: torch.dtype) -> Reduction | None:
    kind = ReduceOp.RedOpType(op)
    names = _OPS_OF_BOOL if dtype == torch.bool else _OPS
    number = _BYTE if dtype == torch.bool else NUMBER_OF.get(dtype)
    if kind not in names or number not in _REDUCIBLE:
        return None
    return Reduction(_core.REDUCE_OPS[names[kind]], 1.0, number, f"{kind}.{dtype}")


def spec_of_reduced(
    name: str,
    source: torch.Tensor,
    target: torch.Tensor,
    how: Reduction,
    parts: int | None = None,
) -> _core.Tensor:
    """Describe plain tensors to the engine, for a reduction; with `parts`, as so many rows."""
    count, addresses = source.numel(), (source.data_ptr(), target.data_ptr())
    if parts is None:
        return _core.Tensor(name, how.number, (count,), *addresses)
    shape = (parts, count // parts)
    return _core.Tensor(name, how.number, shape, *addresses, capacity=target.nbytes)


def _factor(verb: str, op: ReduceOp) -> float:
    _, factor = op.__getstate__()  # torch 2.11 has no `op.factor`.
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise UnsupportedError(
            f"{verb}: PREMUL_SUM with a tensor of {factor.numel()} factors is not supported by "
            "the backend 'hvdlite'; multiply the tensor, and use SUM"
        )
    return float(factor)


_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# PyTorch has no bitwise arithmetic for some unsigned numbers.
_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_bitwise(op: Any, dtype: torch.dtype) -> bool:
    """Return whether an operation combines the bits of this dtype; the engine has it for bool."""
    kind = kind_of(op)
    if kind not in _COMBINE or dtype.is_floating_point or dtype.is_complex:
        return False
    return dtype != torch.bool or bool(kind == ReduceOp.BXOR)


def combine_bits(kind: Any, rows: torch.Tensor, target: torch.Tensor) -> None:
    """Write into a plain tensor what a bitwise operation makes of one row from each rank."""
    number = _AS[target.itemsize]
    combined = functools.reduce(_COMBINE[kind], rows.view(number))
    target.view(-1).view(number).copy_(combined)


class Place(NamedTuple):
    """Plain memory for all that is received for some tensors: one for each rank, or one for all."""

    outputs: Sequence[torch.Tensor]
    address: int
    capacity: int  # in bytes
    memory: list[torch.Tensor]  # keeps the memory alive
    new: torch.Tensor | None  # the memory itself if it is not that of the outputs


def place_of(verb: str, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> Place:
    """Return memory for what is received for checked tensors; raise if the dtypes differ."""
    outputs = list(outputs)
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
        return Place(outputs, begin, end - begin, [output.detach() for output in outputs], None)
    elements = sum(output.numel() for output in outputs)
    new = torch.empty(elements, dtype=source.dtype, device="cpu")
    return Place(outputs, new.data_ptr(), new.numel() * new.itemsize, [new], new)


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
            target.data.copy_(memory)  # as data: autograd does not look at it

    return finish


def deliver(place: Place) -> None:
    if place.new is None:
        return
    parts = place.new.split([output.numel() for output in place.outputs])
    for output, part in zip(place.outputs, parts, strict=True):
        output.data.copy_(part.view(output.shape))


def check_received(verb: str, place: Place, arrived: Sequence[int]) -> None:
    """Raise unless each output has as many elements as have arrived, in units of the engine."""
    wanted = [one.numel() * units_of(one.dtype) for one in place.outputs]
    if arrived == wanted:
        return
    rank = next(i for i, count in enumerate(arrived) if count != wanted[i])
    one = place.outputs[rank]
    raise ArgumentError(
        f"{verb}: {arrived[rank] // units_of(one.dtype)} elements arrived (from rank {rank}, where "
        f"each rank has its own output), and the output has {one.numel()}"
    )
