"""Broadcast of torch tensors, in the four forms that `allreduce` describes, and the barrier."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import basics
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.allreduce import averaged
from hvdlite.torch.collectives.autograd import Handle, parameters_of, tie
from hvdlite.torch.collectives.submit import Submission, start_broadcast
from hvdlite.torch.collectives.tensors import read_and_written, result_of, spec
from hvdlite.torch.dynamo import call_outside, compiling

__all__ = [
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy one rank's tensor to all ranks, into a new tensor.

    Args:
        tensor: of the same shape and dtype on all ranks; only the root's values matter.
        root_rank: the rank (in the world) whose values all receive.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor with the root's values.

    Raises:
        ArgumentError: the tensor cannot be used, or `root_rank` is not a rank.
        MismatchError: the ranks' tensors differ in shape or dtype, or they name different roots.

    Example:
        >>> shared = hvd.broadcast(torch.randn(3), root_rank=0)
    """
    return _broadcast(fast_path.NEW, tensor, root_rank, name, process_set)


@parameters_of(broadcast)
def broadcast_(*given: Any, **options: Any) -> torch.Tensor:
    """Overwrite a contiguous tensor in place, and return it; otherwise as `broadcast`."""
    return _broadcast(fast_path.IN_PLACE, *given, **options)


@parameters_of(broadcast)
def broadcast_async(*given: Any, **options: Any) -> Handle:
    """Start a `broadcast`, and return a handle for `synchronize`; otherwise as `broadcast`."""
    return _broadcast(fast_path.NEW_ASYNC, *given, **options)


@parameters_of(broadcast)
def broadcast_async_(*given: Any, **options: Any) -> Handle:
    """Start a `broadcast_`, and return a handle for `synchronize`; otherwise as `broadcast`."""
    return _broadcast(fast_path.IN_PLACE_ASYNC, *given, **options)


def _broadcast(
    form: int,
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make one of the four forms, as `fast_path` numbers them."""
    if compiling():
        return call_outside(_broadcast, form, tensor, root_rank, name, process_set)
    blocking, in_place = form >= fast_path.NEW, form in fast_path.OVERWRITING
    taken = fast_path.broadcast(tensor, root_rank, name, process_set, form)
    if taken is not None:
        return taken if blocking else Handle(*taken)
    key = name or next_name("broadcast", member_id(process_set))
    check_root(root_rank, process_set)
    source, output = read_and_written(tensor, key, "broadcast", in_place)
    specs = [spec(key, source, output)]
    core = start_broadcast(key, specs, root_rank, process_set, (source, output), blocking)

    def finish(_: Submission) -> torch.Tensor:
        result = result_of(tensor, output, key, in_place)
        return tie(tensor, result, _gradient, key, root_rank, process_set)

    handle = Handle(core, finish)
    return handle.wait() if blocking else handle


def _gradient(
    gradient: torch.Tensor, name: str, root_rank: int, process_set: ProcessSet
) -> torch.Tensor:
    """Average the ranks' gradients on the root; what the others put in had no effect."""
    mean = averaged(gradient, f"{name}.backward", process_set)
    if basics.rank() == root_rank:
        return mean
    # These zeros depend on the mean: a rank that differentiates them again takes part in its
    # backward.
    return mean.masked_fill(torch.ones((), dtype=torch.bool, device=mean.device), 0)


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until every rank, or every member of a process set, has called it.

    Args:
        process_set: its members wait for each other; by default all ranks.
        name: identifies the operation on all ranks; a call without a name is numbered.

    Raises:
        ArgumentError: this rank is not a member of the process set.
        HorovodInternalError: the world is over, for example because a rank died.

    Example:
        >>> hvd.barrier()
    """
    if compiling():
        call_outside(barrier, process_set, name)
        return
    if fast_path.barrier(process_set, name):
        return
    number = member_id(process_set)
    name = name or next_name("barrier", number)
    basics.engine().barrier(name, number, blocking=True).wait()
