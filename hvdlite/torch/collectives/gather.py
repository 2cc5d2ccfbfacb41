"""The collectives on torch tensors that work on rows, slices along the first dimension.

Each has a blocking and an asynchronous form, as in `allreduce`; all are differentiable.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from hvdlite import _core, basics
from hvdlite import ops as neutral
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.torch.collectives.allreduce import averaged, send_named
from hvdlite.torch.collectives.autograd import Handle, tie
from hvdlite.torch.collectives.submit import Reduction, Submission, submit, take_received
from hvdlite.torch.collectives.tensors import Named, grouped, single, spec
from hvdlite.torch.compression import Compression
from hvdlite.torch.dynamo import outside_graphs

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


Splits: TypeAlias = torch.Tensor | Iterable[int] | None  # the number of rows for each rank


@outside_graphs
def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in the order of ranks.

    Args:
        tensor: at least one dimension; the first may differ between ranks, and may be 0; the others
            must be the same.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ArgumentError: the tensor cannot be used; the message says what to do.
        MismatchError: the ranks' tensors differ in dtype or in another dimension.

    Example:
        >>> every_prediction = hvd.allgather(predictions)
    """
    sent = single("allgather", tensor, name, process_set)
    return _start_gathering(sent, process_set, blocking=True).wait()[0]


@outside_graphs
def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allgather`, and return a handle for `synchronize`; otherwise as `allgather`."""
    sent = single("allgather", tensor, name, process_set)
    return _start_gathering(sent, process_set, blocking=False).first()


@outside_graphs
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors, of any dtypes, that complete together; otherwise as `allgather`.

    All ranks give as many `tensors`. The result is a list in the same order.

    Example:
        >>> predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    sent = grouped("allgather", tensors, name, process_set)
    return _start_gathering(sent, process_set, blocking=True).wait()


@outside_graphs
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allgather`, and return a handle; otherwise as `grouped_allgather`."""
    sent = grouped("allgather", tensors, name, process_set)
    return _start_gathering(sent, process_set, blocking=False)


def _start_gathering(sent: Named, process_set: ProcessSet, blocking: bool) -> Handle:
    """Submit an allgather; `wait` of its handle returns the list of results."""
    sources = sent.read()
    specs = _specs(sent, sources)
    enqueue = partial(basics.engine().allgather, sent.name, specs)
    core = submit(enqueue, specs, process_set, sources, blocking)

    def finish(done: Submission) -> list[torch.Tensor]:
        received = take_received(done, sources)
        return [
            tie(tensor, one.tensor, _gathered_gradient, name, one.rows, process_set)
            for tensor, one, name in zip(sent.tensors, received, sent.names, strict=True)
        ]

    return Handle(core, finish)


def _gathered_gradient(
    gradient: torch.Tensor, name: str, first_dimensions: Sequence[int], process_set: ProcessSet
) -> torch.Tensor:
    mean = averaged(gradient, f"{name}.backward", process_set)
    index = process_set.ranks.index(basics.rank())
    start = sum(first_dimensions[:index])
    return mean[start : start + first_dimensions[index]]


@outside_graphs
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    splits: Splits = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and keep this rank's share of the rows.

    Without `splits`, of r rows each of n ranks gets r // n, and the first r % n ranks get one more.
    The shares in rank order are the result of `allreduce`, bit for bit.

    Args:
        tensor: at least one dimension, the same shape on all ranks; bool with Min, Max or Product.
        name, compression, process_set: as for `allreduce`.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: multiply this rank's input, and the result.
        splits: the number of rows that each rank gets, zero or more, the same numbers on all ranks;
            they add up to the first dimension.

    Returns:
        A new tensor: this rank's rows.

    Raises:
        ArgumentError: the tensor or an argument cannot be used; the message says what to do.
        MismatchError: the ranks' tensors differ in shape, dtype or op, or their splits.

    Example:
        >>> my_rows = hvd.reducescatter(torch.ones(5, 3), op=hvd.Sum)
    """
    sent = single("reducescatter", tensor, name, process_set)
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _scatter_compressed(sent, reduction, compression, splits)[0]


@outside_graphs
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    splits: Splits = None,
) -> Handle:
    """Start a `reducescatter`, and return a handle; otherwise as `reducescatter`."""
    sent = single("reducescatter", tensor, name, process_set)
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _start_scattering(sent, reduction, blocking=False, splits=splits).first()


@outside_graphs
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce-scatter several tensors that complete together; otherwise as `reducescatter`.

    All ranks give as many `tensors`, each with the same shape and dtype on all ranks. The result is
    a list in the same order: this rank's rows of each.

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([torch.ones(5, 3), torch.ones(5)])
    """
    sent = grouped("reducescatter", tensors, name, process_set)
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _scatter_compressed(sent, reduction, compression)


@outside_graphs
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce-scatter, and return a handle; otherwise as `grouped_reducescatter`."""
    sent = grouped("reducescatter", tensors, name, process_set)
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _start_scattering(sent, reduction, blocking=False)


def _reduction(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> Reduction:
    return Reduction(neutral.choose_op(None, op), prescale, postscale, process_set=process_set)


def _scatter_compressed(
    sent: Named, reduction: Reduction, compression: Any, splits: Splits = None
) -> list[torch.Tensor]:
    return send_named(
        sent, compression, lambda wires: _start_scattering(wires, reduction, True, splits)
    )


def _start_scattering(
    sent: Named, reduction: Reduction, blocking: bool, splits: Splits = None
) -> Handle:
    """Submit a reducescatter; `wait` of its handle returns the list of results."""
    sources = sent.read()
    numbers = _split_list("reducescatter", splits, sent.name)
    specs = _specs(sent, sources)
    op, prescale, postscale, _, process_set, *_ = reduction
    scatter = basics.engine().reducescatter
    enqueue = partial(scatter, sent.name, specs, op, prescale, postscale, splits=numbers)
    core = submit(enqueue, specs, process_set, sources, blocking)

    def finish(done: Submission) -> list[torch.Tensor]:
        received = take_received(done, sources)
        return [
            tie(tensor, one.tensor, _scattered_gradient, name, reduction, done.core.members)
            for tensor, one, name in zip(sent.tensors, received, sent.names, strict=True)
        ]

    return Handle(core, finish)


def _scattered_gradient(
    gradient: torch.Tensor, name: str, reduction: Reduction, members: int
) -> torch.Tensor:
    """Gather the ranks' gradients, with the same scales: each is about some of the rows."""
    neutral.check_differentiable("reducescatter", name, reduction.op)
    factor = reduction.prescale * reduction.postscale
    if reduction.op == neutral.Sum:
        factor *= members
    name = f"{name}.backward"
    sent = Named(name, [gradient * factor], [name])
    return _start_gathering(sent, reduction.process_set, blocking=True).wait()[0]


@outside_graphs
def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some of a tensor's rows to each rank, and receive some from each.

    Args:
        tensor: at least one dimension; the first may differ between ranks, the others must be the
            same. The rows for rank 0 come first, then those for rank 1, and so on.
        splits: the number of rows for each rank, zero or more; they add up to the first dimension.
            Without `splits` every rank gets the same number.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: whose members take part, one split each; all ranks without.

    Returns:
        A new tensor, the rows from rank 0 first. With `splits`, a pair: that tensor, and the number
        of rows from each rank (of the dtype of `splits`, if that is a tensor; int64 otherwise).

    Raises:
        ArgumentError: the tensor cannot be used, or some rank's splits are wrong. Every rank then
            gets the error, and the message names that rank.
        MismatchError: the ranks' tensors differ in dtype or in another dimension.

    Example:
        >>> splits = [2] * hvd.size()
        >>> rows, received = hvd.alltoall(torch.ones(2 * hvd.size(), 3), splits)
    """
    sent = single("alltoall", tensor, name, process_set)
    return _start_exchanging(sent, splits, process_set, blocking=True).wait()


@outside_graphs
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`, and return a handle for `synchronize`; otherwise as `alltoall`."""
    sent = single("alltoall", tensor, name, process_set)
    return _start_exchanging(sent, splits, process_set, blocking=False)


def _start_exchanging(
    sent: Named, splits: Splits, process_set: ProcessSet, blocking: bool
) -> Handle:
    """Submit an alltoall; `wait` of its handle returns the result of `alltoall`."""
    name, (tensor,), _ = sent
    (source,) = sent.read()
    numbers = _split_list("alltoall", splits, name)
    one = spec(name, source, None)
    enqueue = partial(basics.engine().alltoall, name, one, numbers)
    core = submit(enqueue, [one], process_set, source, blocking)

    def finish(done: Submission) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        (received,) = take_received(done, [source])
        rows = received.rows
        output = tie(tensor, received.tensor, _exchanged_gradient, name, rows, process_set)
        if splits is None:
            return output
        dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int64
        return output, torch.tensor(rows, dtype=dtype, device="cpu")

    return Handle(core, finish)


def _exchanged_gradient(
    gradient: torch.Tensor, name: str, received_splits: Sequence[int], process_set: ProcessSet
) -> torch.Tensor:
    name = f"{name}.backward"
    sent = Named(name, [gradient], [name])
    back, _ = _start_exchanging(sent, received_splits, process_set, blocking=True).wait()
    return back


def _specs(sent: Named, sources: Sequence[torch.Tensor]) -> list[_core.Tensor]:
    return [spec(name, source, None) for source, name in zip(sources, sent.names, strict=True)]


def _split_list(verb: str, splits: Splits, name: str) -> list[int]:
    if splits is None:
        return []
    values = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError:
        numbers = []
    if not numbers:  # The core would take an empty list for no splits.
        raise ArgumentError(
            f"{verb} '{name}': splits={splits!r}; give one whole number of rows for each rank"
        )
    return numbers
