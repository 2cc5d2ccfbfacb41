"""What Keras needs of its PyTorch backend."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras.src.backend.torch.trainer import TorchTrainer
from torch.nn.parallel import DistributedDataParallel

from hvdlite.errors import ArgumentError
from hvdlite.keras.gradients import distributed_part
from hvdlite.ops import Compressor, cast_in_core
from hvdlite.optimizers import check_finite, finite_level
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.gather import allgather as allgather
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
    """Reduce tensors, arrays or None, which stays None, over all ranks; they keep their values."""
    # One tensor may stand for several variables. Sparse gradients without `sparse_as_dense` are an
    # error.
    gradients = [
        one if one is None or torch.is_tensor(one) else keras.ops.convert_to_tensor(one)
        for one in gradients
    ]
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


@functools.cache
def refuse_strategy() -> None:
    """Make `fit` and `evaluate` refuse what Keras 3.16 reduces by torch.distributed, too."""
    for name in ("make_train_function", "make_test_function"):
        setattr(TorchTrainer, name, _refusing(getattr(TorchTrainer, name)))


def _refusing(make: Any) -> Any:
    @functools.wraps(make)
    def make_or_refuse(self: Any, *args: Any, **options: Any) -> Any:
        made = make(self, *args, **options)
        # There Keras wraps the model if torch.distributed has a process group.
        wrapped = [one for one in vars(self).values() if isinstance(one, DistributedDataParallel)]
        several = any(one.process_group.size() > 1 for one in wrapped)
        if several and distributed_part(getattr(self, "optimizer", None)) is not None:
            raise ArgumentError(
                "Keras reduces the gradients by torch.distributed, because that has a process "
                "group, and hvdlite would reduce them a second time; leave out "
                "torch.distributed.init_process_group and keras.distribution, or hvd.distribute "
                "and hvd.DistributedOptimizer"
            )
        return made

    return make_or_refuse


def keep_apply(optimizer: Any) -> None:
    """Make `torch.compile` call the `apply` of an optimizer's own class, uncompiled."""
    # Dynamo looks methods up in the class that `__class__` returns. That is the wrapped class (see
    # `hvdlite.keras.gradients`), whose `apply` does not reduce. An attribute of the object
    # itself takes precedence over both.
    vars(optimizer)["apply"] = torch.compiler.disable(optimizer.apply)


def scale_gradient(gradient: Any, factor: float) -> Any:
    return gradient * factor


def checksum(array: Any) -> Any:
    """Add the words of an array; their order counts."""
    words = keras.ops.convert_to_tensor(array, "float32").view(torch.int32).flatten()
    return words.cumsum(0, dtype=torch.int64).sum()


def random_state(rank: int | None = None) -> Any:
    """Return the state of the generator that data and random layers use, or a rank's own one."""
    state = torch.get_rng_state()
    if rank is None:
        return state
    seed = zlib.crc32(state.numpy().tobytes()) + rank
    torch.cuda.manual_seed_all(seed)  # It serves no data.
    return torch.Generator().manual_seed(seed).get_state()


def swap_random(state: Any) -> Any:
    old = torch.get_rng_state()
    torch.set_rng_state(state)
    return old


def shuffle_alike(given: dict[str, Any], seed: int) -> None:
    """Do nothing: the ranks' generators are alike."""
