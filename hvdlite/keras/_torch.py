"""The adapter of hvdlite.keras for the PyTorch backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from hvdlite import basics
from hvdlite.compression import Compressor, cast_in_core
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import Named, readable
from hvdlite.torch.compression import Compression
from hvdlite.torch.virtual.machine import describe
from hvdlite.virtual.agreement import check_threads

__all__ = [
    "Compression",
    "allreduce_gradients",
    "call_with_arrays",
    "check_machine",
    "collective_errors",
    "describe_machine",
    "keep_apply",
    "outside_of_graphs",
    "prepare_virtual_ranks",
    "refuse_strategy",
    "scale_gradient",
    "seed_backend",
]

# PyTorch raises the errors of collectives as they are.
collective_errors = contextlib.nullcontext


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
    # One tensor may stand for several variables. A gradient has the same wire name in every step.
    # Sparse gradients without `sparse_as_dense` are an error.
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


# PyTorch runs what it is told at once.
outside_of_graphs = contextlib.nullcontext


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
    # `hvdlite.keras.distribution`), whose `apply` does not reduce. An attribute of the object
    # itself takes precedence over both.
    vars(optimizer)["apply"] = torch.compiler.disable(optimizer.apply)


def scale_gradient(gradient: Any, factor: float) -> Any:
    """Multiply a tensor."""
    return gradient * factor


def prepare_virtual_ranks(model: Any, threads: int) -> None:
    """Set the number of threads; refuse what would not have the same bits."""
    if basics.size() > 1 and any(variable.value.is_cuda for variable in model.trainable_variables):
        raise ArgumentError(
            "virtual_steps(): gradients of GPUs are computed in an order of their own; train on "
            "one GPU, or on CPUs"
        )
    torch.set_num_threads(threads)


def check_machine(threads: int) -> None:
    """Raise an error if the number of threads was changed in a loop."""
    check_threads(torch.get_num_threads(), threads)


# The layers draw from seeds that Keras keeps; this is for what is drawn from torch itself.
seed_backend = torch.manual_seed


def describe_machine(threads: int) -> dict[str, str]:
    """Return what decides the bits that this machine computes."""
    return {**describe(threads), "keras": keras.__version__}
