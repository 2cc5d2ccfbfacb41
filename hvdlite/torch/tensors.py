"""What the core needs to know of a torch tensor, and which tensors it can take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import _core
from hvdlite.errors import ArgumentError
from hvdlite.ops import dtype_number
from hvdlite.torch.compression import WIDE

NUMBER_OF = {
    getattr(torch, name): number for name, number in _core.DTYPES.items() if hasattr(torch, name)
}


def check(tensor: torch.Tensor, name: str) -> None:
    """Refuse what the core cannot take; the message says what to do.

    Raises:
        ArgumentError: `tensor` is no dense tensor on a CPU or CUDA device, or of an unknown type.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"'{name}' is a {type(tensor).__name__}, not a tensor; use torch.as_tensor(), or "
            "broadcast_object/allgather_object for any object"
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


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values: contiguous, and no view of a conjugate."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def read_and_written(
    tensor: torch.Tensor, name: str, verb: str, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a tensor; give what a collective reads of it, and what receives a result like it.

    In place both are the tensor itself.

    Raises:
        ArgumentError: as `check`, or it is to be overwritten and not contiguous.
    """
    check(tensor, name)
    if not in_place:
        source = plain(tensor.detach())
        return source, torch.empty_like(source)
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"'{name}' is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): "
            f"{verb}_ writes into its memory in place; use {verb}(), or tensor.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"'{name}' is a view whose memory holds other values, conjugate or negative ones: "
            f"{verb}_ writes into it in place; use {verb}(), or tensor.resolve_conj().resolve_neg()"
        )
    return tensor, tensor


def spec(
    name: str, source: torch.Tensor, target: torch.Tensor | None, wire: int | None = None
) -> _core.Tensor:
    """Describe a checked, contiguous tensor: where it is read, and where the result goes.

    `wire`: what an allreduce casts float32 and float64 to on the way, see `cast_in_core`.
    """
    return _core.Tensor(
        name,
        NUMBER_OF[source.dtype],
        source.shape,
        source.data_ptr(),
        0 if target is None else target.data_ptr(),
        source.device.index if source.is_cuda else -1,
        wire if source.dtype in WIDE else None,
    )


def names_of(name: str, count: int) -> list[str]:
    """Name the tensors of a grouped collective, for messages."""
    return [f"{name}.{i}" for i in range(count)]


def note_written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that these were overwritten, so that it refuses a stale backward."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
