"""Allreduce of torch tensors; `broadcast` and `gather` have the other collectives.

Each collective has up to four forms: `verb` returns a new tensor, `verb_` overwrites its argument,
and `verb_async`/`verb_async_` return a handle at once, for `synchronize`. All are differentiable; a
leaf that is overwritten in place is treated as data. `name` identifies the operation on all ranks.
Calls without a name are numbered, so every rank must make them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import ops as neutral
from hvdlite.compression import cast_in_core, send_compressed
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id
from hvdlite.torch.collectives.gradients import Reduced, tie
from hvdlite.torch.collectives.handle import Handle
from hvdlite.torch.collectives.submit import Reduction, Submission, start_allreduce
from hvdlite.torch.collectives.tensors import check, names_of, read_and_written, result_of, spec
from hvdlite.torch.compression import Compression


def _reduction(
    average: bool | None,
    op: int | None,
    prescale: float,
    postscale: float,
    weight: float | None,
    process_set: ProcessSet,
) -> Reduction:
    op = neutral.choose_op(average, op)
    weight = None if weight is None else float(weight)
    return Reduction(op, prescale, postscale, weight, process_set)


def start_reducing(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    name: str,
    reduction: Reduction,
    in_place: bool,
    blocking: bool = False,
) -> Handle:
    """Submit an allreduce; `wait` of its handle returns the list of results."""
    specs, sources, outputs = [], [], []
    for tensor, tensor_name in zip(tensors, names, strict=True):
        source, output = read_and_written(tensor, tensor_name, "allreduce", in_place)
        specs.append(spec(tensor_name, source, output, reduction.wire))
        sources.append(source)
        outputs.append(output)
    core = start_allreduce(name, specs, reduction, (sources, outputs), blocking)

    def results() -> list[torch.Tensor]:
        return [
            result_of(tensor, output, tensor_name, in_place)
            for tensor, output, tensor_name in zip(tensors, outputs, names, strict=True)
        ]

    def finish(_: Submission) -> list[torch.Tensor]:
        return [
            tie(Reduced, tensor, output, tensor_name, reduction)
            for tensor, output, tensor_name in zip(tensors, results(), names, strict=True)
        ]

    return Handle(core, finish)


def _reduce(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    name: str,
    reduction: Reduction,
    compression: Any,
) -> list[torch.Tensor]:
    """Allreduce tensors, compressed while they travel, into new ones, and wait for them."""
    for tensor, tensor_name in zip(tensors, names, strict=True):
        check(tensor, tensor_name)
    wire, compression = cast_in_core(compression, reduction.op)
    reduction = reduction._replace(wire=wire)
    return send_compressed(
        lambda wires: start_reducing(wires, names, name, reduction, False, blocking=True).wait(),
        tensors,
        compression,
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks into a new one.

    Args:
        tensor: any shape, the same on all ranks; not bool. Averages of integers are rounded towards
            zero.
        average: the older form of `op`: True for `Average`, False for `Sum`.
        name: identifies the operation on all ranks; a call without a name is numbered.
        compression: how the tensor is compressed while it travels, see `Compression`.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: multiplies this rank's input.
        postscale_factor: multiplies the result.
        process_set: its members take part; by default all ranks.
        weight: makes the result sum(weight * tensor) / sum(weight). It is this rank's number of
            samples or tokens, for example; zero leaves this rank out. All ranks give one, or none
            does.

    Returns:
        The result, with the same bits on every rank.

    Raises:
        ArgumentError: the tensor or an argument cannot be used; the message says what to do.
        MismatchError: the ranks' tensors differ in shape, dtype or op.
        HorovodInternalError: the world is over, for example because a rank died.

    Example:
        >>> mean_loss = hvd.allreduce(loss, name="loss", weight=len(batch))
    """
    name = name or next_name("allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    return _reduce([tensor], [name], name, reduction, compression)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> Handle:
    """Start to reduce a tensor over all ranks into a new one; arguments as for `allreduce`.

    Example:
        >>> handle = hvd.allreduce_async(loss.detach(), name="loss")
        >>> mean_loss = hvd.synchronize(handle)
    """
    name = name or next_name("allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    return start_reducing([tensor], [name], name, reduction, in_place=False).first()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> torch.Tensor:
    """Reduce a contiguous tensor over all ranks in place; arguments as for `allreduce`.

    Example:
        >>> hvd.allreduce_(running_mean)
    """
    name = name or next_name("allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    handle = start_reducing([tensor], [name], name, reduction, in_place=True, blocking=True)
    result: torch.Tensor = handle.wait()[0]
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> Handle:
    """Start to reduce a contiguous tensor in place; arguments as for `allreduce`.

    Example:
        >>> handle = hvd.allreduce_async_(running_mean)
        >>> hvd.synchronize(handle) is running_mean
        True
    """
    name = name or next_name("allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    return start_reducing([tensor], [name], name, reduction, in_place=True).first()


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> list[torch.Tensor]:
    """Reduce several tensors, of any dtypes, that complete together; otherwise as `allreduce`.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy], name="metrics")
    """
    name = name or next_name("grouped_allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    names = names_of(name, len(tensors))
    return _reduce(tensors, names, name, reduction, compression)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> Handle:
    """Start a `grouped_allreduce`; `synchronize` returns the list of new tensors.

    Example:
        >>> handle = hvd.grouped_allreduce_async([loss, accuracy], name="metrics")
        >>> loss, accuracy = hvd.synchronize(handle)
    """
    name = name or next_name("grouped_allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    return start_reducing(tensors, names_of(name, len(tensors)), name, reduction, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> list[torch.Tensor]:
    """Reduce several contiguous tensors in place; they complete together.

    Example:
        >>> hvd.grouped_allreduce_([running_mean, running_var])
    """
    name = name or next_name("grouped_allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    names = names_of(name, len(tensors))
    handle = start_reducing(tensors, names, name, reduction, in_place=True, blocking=True)
    results: list[torch.Tensor] = handle.wait()
    return results


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> Handle:
    """Start a `grouped_allreduce_`; `synchronize` returns the list of the same tensors.

    Example:
        >>> handle = hvd.grouped_allreduce_async_([running_mean, running_var])
        >>> hvd.synchronize(handle)
    """
    name = name or next_name("grouped_allreduce", member_id(process_set))
    reduction = _reduction(average, op, prescale_factor, postscale_factor, weight, process_set)
    return start_reducing(tensors, names_of(name, len(tensors)), name, reduction, in_place=True)
