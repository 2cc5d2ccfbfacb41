"""What Keras needs of its PyTorch backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.ops import Compressor, cast_in_core
from hvdlite.optimizers import check_finite, finite_level
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import Named, is_finite, readable
from hvdlite.torch.compression import Compression as Compression

collective_errors = contextlib.nullcontext  # PyTorch raises the errors as they are,
outside_of_graphs = contextlib.nullcontext  # and runs what it is told at once.


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()  # type: ignore[untyped-decorator]
def allreduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    *,
    op: int,
    compression: type[Compressor] | Compressor,
    prescale_factor: float,
    postscale_factor: float,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> list[Any]:
    """Reduce tensors or None, which stays None, over all ranks; the tensors keep their values."""
    # One tensor may stand for several variables. Sparse gradients without `sparse_as_dense` are an
    # error.
    if finite_level():
        check_finite(names[0], zip(names, map(is_finite, gradients), strict=True))
    cast, compression = cast_in_core(compression, op)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set=process_set, wire=cast)
    started: list[Any] = []
    for gradient, name in zip(gradients, names, strict=True):
        if gradient is None:
            started.append(None)
            continue
        if sparse_as_dense and gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        wire, context = compression.compress(gradient)
        if wire.layout == torch.strided:
            wire = readable(wire)
        handle = start_reducing(Named(name, [wire], [name]), reduction, in_place=False).first()
        started.append((handle, context))
    return [
        None if one is None else compression.decompress(one[0].wait(), one[1]) for one in started
    ]


def call_with_arrays(
    call: Callable[..., list[Any]], tensors: Sequence[Any], like: Sequence[Any]
) -> list[Any]:
    """Call a function with the tensors, on any device, as arrays; return its arrays as tensors."""
    arrays = call(*[tensor.detach().to_dense().cpu().numpy() for tensor in tensors])
    return [torch.from_numpy(array) for array in arrays]


def refuse_strategy() -> None:
    """Do nothing: strategies are TensorFlow's."""


def keep_apply(optimizer: Any) -> None:
    """Make `torch.compile` call the `apply` of an optimizer's own class, uncompiled."""
    # Dynamo looks methods up in the class that `__class__` returns. That is the wrapped class (see
    # `hvdlite.keras.gradients`), whose `apply` does not reduce. An attribute of the object
    # itself takes precedence over both.
    vars(optimizer)["apply"] = torch.compiler.disable(optimizer.apply)


def scale_gradient(gradient: Any, factor: float) -> Any:
    return gradient * factor
