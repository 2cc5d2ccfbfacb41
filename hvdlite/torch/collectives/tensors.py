"""Checks torch tensors and describes them to the core."""

from __future__ import annotations

import ctypes
import reprlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from hvdlite import _core
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.ops import dtype_number, next_name, travels_as
from hvdlite.process_sets import ProcessSet, member_id

NUMBER_OF = {
    getattr(torch, name): number for name, number in _core.DTYPES.items() if hasattr(torch, name)
}
_NAME_OF = {getattr(torch, name): name for name in _core.DTYPES if hasattr(torch, name)}


def check(tensor: torch.Tensor, name: str) -> None:
    """Raise an ArgumentError, which says what to do, if the core cannot send a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"'{name}' is a {type(tensor).__name__}, not a tensor; use torch.as_tensor(), or "
            f"broadcast_object/allgather_object for any object. It is {reprlib.repr(tensor)}"
        )
    if type(tensor) is not torch.Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        raise ArgumentError(
            f"'{name}' is a {type(tensor).__name__}, which has no memory of its own: give the "
            "tensors that it is made of (of a DTensor .to_local(), or .full_tensor())"
        )
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"'{name}' is a sparse tensor; use .to_dense(), and for gradients "
            "DistributedOptimizer(..., sparse_as_dense=True), or hvd.sparse_allreduce_async()"
        )
    if tensor.device.type != "cpu" and not (tensor.is_cuda and torch.version.hip is None):
        raise ArgumentError(
            f"'{name}' is on {tensor.device}, but host memory and CUDA devices only can be sent; "
            "move it with .cpu()"
        )
    if tensor.dtype not in NUMBER_OF:
        dtype_number(str(tensor.dtype).removeprefix("torch."), name)


def is_finite(gradient: torch.Tensor | None) -> bool:
    """Return whether there is no NaN and no infinity; a missing gradient has none."""
    if gradient is None:
        return True
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())


def lies_otherwise(tensor: torch.Tensor) -> bool:
    """Return whether the memory has other values than the tensor, like that of `x.conj().imag`."""
    return tensor.is_neg() or tensor.is_conj()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the values of a checked one: its own memory, or a copy."""
    # The result is another object. It keeps that memory alive even if `tensor.data` is replaced.
    source = tensor.detach()
    if lies_otherwise(source):
        source = source.resolve_conj().resolve_neg()
    return source.contiguous()


def read_and_written(
    tensor: torch.Tensor, name: str, verb: str, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor that a collective reads, and one for its result; raise if there is none."""
    # In place both are the tensor's memory. They keep that memory alive, so that a script that
    # replaces `tensor.data` meanwhile frees no memory that the core reads or writes.
    check(tensor, name)
    if not in_place:
        source = readable(tensor)
        return source, torch.empty_like(source)
    if lies_otherwise(tensor):
        raise ArgumentError(
            f"'{name}' is a negated or conjugated view: {verb}_ writes into its memory in place; "
            f"use {verb}(), or tensor.resolve_conj().resolve_neg()"
        )
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"'{name}' is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): "
            f"{verb}_ writes into its memory in place; use {verb}(), or tensor.contiguous()"
        )
    memory = tensor.detach()
    return memory, memory


def result_of(
    tensor: torch.Tensor, output: torch.Tensor, name: str, in_place: bool
) -> torch.Tensor:
    """Return `tensor` in place, else `output`; raise if `tensor` has got other memory meanwhile."""
    if not in_place:
        return output
    if tensor.data_ptr() != output.data_ptr():
        raise_moved(name)
    return tensor


def raise_moved(name: str) -> NoReturn:
    """Raise the error of a tensor that has other memory than when its collective began."""
    raise HvdliteError(
        f"'{name}' was given other memory, by tensor.data = ... or tensor.set_(), while a "
        "collective wrote to it in place; the result is lost: synchronize() the handle first"
    )


def spec(
    name: str, source: torch.Tensor, target: torch.Tensor | None, wire: int | None = None
) -> _core.Tensor:
    """Describe a checked, contiguous tensor to the core: the memory to read and to write."""
    # An allreduce casts some tensors to `wire` on the way, see `cast_in_core`.
    return _core.Tensor(
        name,
        NUMBER_OF[source.dtype],
        source.shape,
        source.data_ptr(),
        0 if target is None else target.data_ptr(),
        source.device.index if source.is_cuda else -1,
        travels_as(wire, _NAME_OF[source.dtype]),
    )


class Named(NamedTuple):
    """The tensors that one operation takes, with the names that messages have for them."""

    name: str  # of the operation, the same on all ranks
    tensors: Sequence[torch.Tensor]
    names: Sequence[str]

    def read(self) -> list[torch.Tensor]:
        """Check the tensors, and return each as memory for the core to read."""
        self.check()
        return [readable(tensor) for tensor in self.tensors]

    def check(self) -> None:
        for tensor, name in zip(self.tensors, self.names, strict=True):
            check(tensor, name)


def single(verb: str, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Named:
    """Name the tensor of an operation that takes one; numbered by `verb` if `name` is None."""
    name = name or next_name(verb, member_id(process_set))
    return Named(name, [tensor], [name])


def grouped(
    verb: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> Named:
    """Name the tensors of a grouped operation; numbered by `verb` if `name` is None."""
    name = name or next_name(f"grouped_{verb}", member_id(process_set))
    return Named(name, tensors, [f"{name}.{i}" for i in range(len(tensors))])


def note_written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that these tensors were overwritten, so that it refuses a stale backward."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def tensor_over(memory: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose values are these bytes, without a copy."""
    if not len(memory):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).reshape(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; they keep its memory alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.storage = tensor.untyped_storage()
    return memoryview(memory).cast("B")
