"""The collectives on torch tensors that work on rows, slices along the first dimension.

Each has a blocking and an asynchronous form, as in `allreduce`; all are differentiable.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite import ops as neutral
from hvdlite.compression import send_compressed
from hvdlite.errors import ArgumentError
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id
from hvdlite.torch.collectives.gradients import Exchanged, Gathered, Scattered, tie
from hvdlite.torch.collectives.handle import Handle
from hvdlite.torch.collectives.submit import (
    Reduction,
    Submission,
    start_allgather,
    start_alltoall,
    start_reducescatter,
    take_received,
)
from hvdlite.torch.collectives.tensors import check, names_of, readable, spec
from hvdlite.torch.compression import Compression


def _sources(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    for tensor, name in zip(tensors, names, strict=True):
        check(tensor, name)
    return [readable(tensor) for tensor in tensors]


def _specs(sources: Sequence[torch.Tensor], names: Sequence[str]) -> list[_core.Tensor]:
    return [spec(name, source, None) for source, name in zip(sources, names, strict=True)]


def _start_gathering(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    name: str,
    process_set: ProcessSet,
    blocking: bool,
) -> Handle:
    """Submit an allgather; `wait` of its handle returns the list of results."""
    sources = _sources(tensors, names)
    core = start_allgather(name, _specs(sources, names), process_set, sources, blocking)

    def finish(core: Submission) -> list[torch.Tensor]:
        received = take_received(core, sources)
        return [
            tie(Gathered, tensor, one.tensor, tensor_name, one.rows, process_set)
            for tensor, one, tensor_name in zip(tensors, received, names, strict=True)
        ]

    return Handle(core, finish)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in the order of ranks.

    Args:
        tensor: at least one dimension; the first may differ between ranks, and may be 0; the others
            must be the same.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: its members take part; by default all ranks.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ArgumentError: the tensor cannot be used; the message says what to do.
        MismatchError: the ranks' tensors differ in dtype or in another dimension.

    Example:
        >>> every_prediction = hvd.allgather(predictions)
    """
    name = name or next_name("allgather", member_id(process_set))
    result: torch.Tensor = _start_gathering(
        [tensor], [name], name, process_set, blocking=True
    ).wait()[0]
    return result


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allgather`.

    Example:
        >>> handle = hvd.allgather_async(predictions)
        >>> every_prediction = hvd.synchronize(handle)
    """
    name = name or next_name("allgather", member_id(process_set))
    return _start_gathering([tensor], [name], name, process_set, blocking=False).first()


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors, of any dtypes, that complete together; otherwise as `allgather`.

    Example:
        >>> predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    name = name or next_name("grouped_allgather", member_id(process_set))
    handle = _start_gathering(
        tensors, names_of(name, len(tensors)), name, process_set, blocking=True
    )
    results: list[torch.Tensor] = handle.wait()
    return results


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allgather`; `synchronize` returns the list of new tensors.

    Example:
        >>> handle = hvd.grouped_allgather_async([predictions, labels])
        >>> predictions, labels = hvd.synchronize(handle)
    """
    name = name or next_name("grouped_allgather", member_id(process_set))
    return _start_gathering(
        tensors, names_of(name, len(tensors)), name, process_set, blocking=False
    )


def _start_scattering(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    name: str,
    reduction: Reduction,
    blocking: bool,
) -> Handle:
    """Submit a reducescatter; `wait` of its handle returns the list of results."""
    sources = _sources(tensors, names)
    core = start_reducescatter(name, _specs(sources, names), reduction, sources, blocking)

    def finish(core: Submission) -> list[torch.Tensor]:
        received = take_received(core, sources)
        return [
            tie(Scattered, tensor, one.tensor, tensor_name, reduction, core.members)
            for tensor, one, tensor_name in zip(tensors, received, names, strict=True)
        ]

    return Handle(core, finish)


def _reduction(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> Reduction:
    op = neutral.choose_op(None, op)
    return Reduction(op, prescale, postscale, process_set=process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and keep this rank's share of the rows.

    With r rows and n ranks each gets r // n rows, and the first r % n ranks get one more. The
    shares in rank order are the result of `allreduce`, bit for bit.

    Args:
        tensor: at least one dimension, the same shape on all ranks; not bool.
        name: identifies the operation on all ranks; a call without a name is numbered.
        compression: how the tensor is compressed while it travels, see `Compression`.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        process_set: its members take part; by default all ranks.
        prescale_factor: multiplies this rank's input.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor: this rank's rows.

    Raises:
        ArgumentError: the tensor or an argument cannot be used; the message says what to do.
        MismatchError: the ranks' tensors differ in shape, dtype or op.

    Example:
        >>> my_rows = hvd.reducescatter(torch.ones(5, 3), op=hvd.Sum)
    """
    name = name or next_name("reducescatter", member_id(process_set))
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _reducescatter([tensor], [name], name, reduction, compression)[0]


def _reducescatter(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    name: str,
    reduction: Reduction,
    compression: Any,
) -> list[torch.Tensor]:
    for tensor, tensor_name in zip(tensors, names, strict=True):
        check(tensor, tensor_name)
    return send_compressed(
        lambda wires: _start_scattering(wires, names, name, reduction, blocking=True).wait(),
        tensors,
        compression,
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`.

    Example:
        >>> handle = hvd.reducescatter_async(torch.ones(5, 3), op=hvd.Sum)
        >>> my_rows = hvd.synchronize(handle)
    """
    name = name or next_name("reducescatter", member_id(process_set))
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _start_scattering([tensor], [name], name, reduction, blocking=False).first()


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

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([torch.ones(5, 3), torch.ones(5)])
    """
    name = name or next_name("grouped_reducescatter", member_id(process_set))
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _reducescatter(tensors, names_of(name, len(tensors)), name, reduction, compression)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`; `synchronize` returns the list of new tensors.

    Example:
        >>> handle = hvd.grouped_reducescatter_async([torch.ones(5, 3), torch.ones(5)])
        >>> weights, biases = hvd.synchronize(handle)
    """
    name = name or next_name("grouped_reducescatter", member_id(process_set))
    reduction = _reduction(op, prescale_factor, postscale_factor, process_set)
    return _start_scattering(tensors, names_of(name, len(tensors)), name, reduction, blocking=False)


def _split_list(splits: torch.Tensor | Iterable[int] | None, name: str) -> list[int]:
    if splits is None:
        return []
    values = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise ArgumentError(
            f"alltoall '{name}': splits={splits!r}; give one whole number of rows for each rank"
        ) from error


def _start_exchanging(
    tensor: torch.Tensor,
    splits: torch.Tensor | Iterable[int] | None,
    name: str,
    process_set: ProcessSet,
    blocking: bool,
) -> Handle:
    """Submit an alltoall; `wait` of its handle returns the result of `alltoall`."""
    (source,) = _sources([tensor], [name])
    numbers = _split_list(splits, name)
    one = spec(name, source, None)
    core = start_alltoall(name, one, numbers, process_set, source, blocking)

    def finish(core: Submission) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        (received,) = take_received(core, [source])
        output = tie(Exchanged, tensor, received.tensor, name, received.rows, process_set)
        if splits is None:
            return output
        dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int64
        return output, torch.tensor(received.rows, dtype=dtype)

    return Handle(core, finish)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Iterable[int] | None = None,
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
    name = name or next_name("alltoall", member_id(process_set))
    return _start_exchanging(tensor, splits, name, process_set, blocking=True).wait()


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`; `synchronize` returns its result.

    Example:
        >>> handle = hvd.alltoall_async(torch.ones(2 * hvd.size(), 3))
        >>> rows = hvd.synchronize(handle)
    """
    name = name or next_name("alltoall", member_id(process_set))
    return _start_exchanging(tensor, splits, name, process_set, blocking=False)
