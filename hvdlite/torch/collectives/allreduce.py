"""Allreduce of torch tensors; `broadcast` and `gather` have the other collectives.

Each collective has up to four forms: `verb` returns a new tensor, `verb_` overwrites its argument,
and `verb_async`/`verb_async_` return a handle at once, for `synchronize`. All are differentiable; a
leaf that is overwritten in place is treated as data. `name` identifies the operation on all ranks.
Calls without a name are numbered, so every rank must make them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdlite import ops as neutral
from hvdlite.errors import ArgumentError
from hvdlite.ops import cast_in_core, next_name, send_compressed
from hvdlite.process_sets import ProcessSet, global_process_set, member_id, process_set_by_id
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.autograd import Handle, parameters_of, tie
from hvdlite.torch.collectives.submit import Reduction, Submission, start_allreduce
from hvdlite.torch.collectives.tensors import (
    Named,
    grouped,
    read_and_written,
    result_of,
    single,
    spec,
)
from hvdlite.torch.compression import Compression
from hvdlite.torch.dynamo import call_outside, compiling

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allreduce_buffers",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


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
        tensor: any shape, the same on all ranks; bool with Min, Max or Product. Averages of
            integers are rounded towards zero.
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
    if _OPERATOR and compiling() and weight is None and compression is Compression.none:
        return torch.ops.hvdlite.allreduce(
            tensor, name or "", neutral.choose_op(average, op),
            prescale_factor, postscale_factor, member_id(process_set),
        )  # fmt: skip
    return _allreduce(
        single, fast_path.NEW, tensor, average, name, op,
        prescale_factor, postscale_factor, process_set, weight, compression,
    )  # fmt: skip


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
    """Reduce a contiguous tensor in place, and return it; otherwise as `allreduce`."""
    return _allreduce(
        single, fast_path.IN_PLACE, tensor, average, name, op,
        prescale_factor, postscale_factor, process_set, weight,
    )  # fmt: skip


@parameters_of(allreduce_)
def allreduce_async(tensor: torch.Tensor, *given: Any, **options: Any) -> Handle:
    """Start an `allreduce`, and return a handle for `synchronize`; otherwise as `allreduce`.

    Example:
        >>> handle = hvd.allreduce_async(loss.detach(), name="loss")
        >>> mean_loss = hvd.synchronize(handle)
    """
    return _allreduce(single, fast_path.NEW_ASYNC, tensor, *given, **options)


@parameters_of(allreduce_)
def allreduce_async_(tensor: torch.Tensor, *given: Any, **options: Any) -> Handle:
    """Start an `allreduce_`, and return a handle; otherwise as `allreduce`.

    Until `synchronize` the tensor must be neither read nor changed.
    """
    return _allreduce(single, fast_path.IN_PLACE_ASYNC, tensor, *given, **options)


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

    All ranks give as many `tensors`, each with the same shape and dtype on all ranks. The result is
    a list in the same order.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy], name="metrics")
    """
    return _allreduce(
        grouped, fast_path.NEW, tensors, average, name, op,
        prescale_factor, postscale_factor, process_set, weight, compression,
    )  # fmt: skip


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
    """Reduce contiguous tensors in place, and return them; otherwise as `grouped_allreduce`."""
    return _allreduce(
        grouped, fast_path.IN_PLACE, tensors, average, name, op,
        prescale_factor, postscale_factor, process_set, weight,
    )  # fmt: skip


@parameters_of(grouped_allreduce_)
def grouped_allreduce_async(*given: Any, **options: Any) -> Handle:
    """Start a `grouped_allreduce`, and return a handle; otherwise as `grouped_allreduce`."""
    return _allreduce(grouped, fast_path.NEW_ASYNC, *given, **options)


@parameters_of(grouped_allreduce_)
def grouped_allreduce_async_(*given: Any, **options: Any) -> Handle:
    """Start a `grouped_allreduce_`, and return a handle; otherwise as `grouped_allreduce`.

    Until `synchronize` the tensors must be neither read nor changed.
    """
    return _allreduce(grouped, fast_path.IN_PLACE_ASYNC, *given, **options)


def allreduce_buffers(model: nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Replace every floating-point buffer of a model by its average over the ranks.

    Each rank's batch normalization computes moving averages from that rank's batches. Call this
    function on every rank before evaluation and before a checkpoint, so that all ranks evaluate the
    same model. Buffers of other types, such as the number of batches, keep their values.

    Args:
        model: the model; its buffers are averaged in place.
        process_set: its members take part; by default all ranks.

    Raises:
        ArgumentError: `model` is not a model, or a buffer cannot be sent.
        MismatchError: the ranks' models differ.

    Example:
        >>> hvd.allreduce_buffers(model)
        >>> accuracy = evaluate(model.eval())
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"allreduce_buffers takes a model, not a {type(model).__name__}")
    name = next_name("allreduce_buffers", member_id(process_set))
    buffers = [one for one in model.buffers() if one.is_floating_point()]
    if not buffers:
        return
    with torch.no_grad():
        averages = grouped_allreduce(
            [one.detach() for one in buffers], name=name, process_set=process_set
        )
        for buffer, average in zip(buffers, averages, strict=True):
            buffer.copy_(average)


def _allreduce(
    named: Callable[..., Named],
    form: int,
    tensors: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: float | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Make one of the eight forms: `named` is `single` or `grouped`, `form` one of fast_path."""
    if compiling():  # This is quicker than the decorator.
        return call_outside(
            _allreduce, named, form, tensors, average, name, op,
            prescale_factor, postscale_factor, process_set, weight, compression,
        )  # fmt: skip
    if weight is None and compression is Compression.none:
        taken = fast_path.allreduce(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set, form
        )
        if taken is not None:
            return taken if form >= fast_path.NEW else Handle(*taken)
    sent = named("allreduce", tensors, name, process_set)
    op = neutral.choose_op(average, op)
    wire, by_hand = cast_in_core(compression, op)
    weight = None if weight is None else float(weight)
    reduction = Reduction(op, prescale_factor, postscale_factor, weight, process_set, wire)
    if form == fast_path.NEW:
        results = send_named(
            sent, by_hand, lambda wires: start_reducing(wires, reduction, False, blocking=True)
        )
        return results if named is grouped else results[0]
    blocking = form == fast_path.IN_PLACE
    handle = start_reducing(sent, reduction, form in fast_path.OVERWRITING, blocking)
    if named is single:
        handle = handle.first()
    return handle.wait() if blocking else handle


def send_named(
    sent: Named, compression: Any, start: Callable[[Named], Handle]
) -> list[torch.Tensor]:
    """Compress tensors, wait for the collective that `start` makes of them, and decompress."""
    sent.check()
    return send_compressed(
        lambda wires: start(sent._replace(tensors=wires)).wait(), sent.tensors, compression
    )


def start_reducing(
    sent: Named, reduction: Reduction, in_place: bool, blocking: bool = False
) -> Handle:
    """Submit an allreduce; `wait` of its handle returns the list of results."""
    specs, sources, outputs = [], [], []
    for tensor, name in zip(sent.tensors, sent.names, strict=True):
        source, output = read_and_written(tensor, name, "allreduce", in_place)
        specs.append(spec(name, source, output, reduction.wire))
        sources.append(source)
        outputs.append(output)
    core = start_allreduce(sent.name, specs, reduction, (sources, outputs), blocking)

    def finish(_: Submission) -> list[torch.Tensor]:
        written = zip(sent.tensors, outputs, sent.names, strict=True)
        results = [result_of(tensor, output, name, in_place) for tensor, output, name in written]
        return [
            tie(tensor, result, _gradient, name, reduction)
            for tensor, result, name in zip(sent.tensors, results, sent.names, strict=True)
        ]

    return Handle(core, finish)


def _gradient(gradient: torch.Tensor, name: str, reduction: Reduction) -> torch.Tensor:
    """Reduce the gradients in the same way; in a weighted average each rank takes its share."""
    neutral.check_differentiable("allreduce", name, reduction.op)
    name = f"{name}.backward"
    if reduction.weight is None:
        return reduce(gradient, name, reduction)
    weight = torch.tensor(reduction.weight, dtype=torch.float64, device="cpu")
    in_sum = Reduction(neutral.Sum, process_set=reduction.process_set)
    total = float(reduce(weight, f"{name}.weight", in_sum))
    gradient = reduce(gradient, name, reduction._replace(op=neutral.Sum, weight=None))
    return gradient * (reduction.weight / total if total else 0.0)


def reduce(tensor: torch.Tensor, name: str, reduction: Reduction) -> torch.Tensor:
    """Reduce one tensor into a new one, and wait; differentiable."""
    sent = Named(name, [tensor], [name])
    return start_reducing(sent, reduction, in_place=False, blocking=True).wait()[0]


def averaged(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    return reduce(tensor, name, Reduction(neutral.Average, process_set=process_set))


# `allreduce` as an operator of torch, so that compiled graphs contain it.
#
# Dynamo cannot trace into the core. An operator that is registered with torch, with its shape rule
# and its gradient, becomes one node of the graph instead, also under `fullgraph=True`. The node is
# run as an ordinary call: without a name it gets its number when it runs, not when it is traced.


def _run_in_graph(
    tensor: torch.Tensor, name: str, op: int, prescale: float, postscale: float, process_set: int
) -> torch.Tensor:
    members = process_set_by_id(process_set)
    name = name or next_name("allreduce", member_id(members))
    return reduce(tensor, name, Reduction(op, prescale, postscale, None, members))


def _shape_in_graph(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]


def _gradient_in_graph(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    name, op, *others = ctx.arguments
    neutral.check_differentiable("allreduce", name, op)
    reduced = torch.ops.hvdlite.allreduce(gradient, f"{name}.backward" * bool(name), op, *others)
    return reduced, None, None, None, None, None


_OPERATOR = hasattr(torch.library, "custom_op")  # Before torch 2.4 a graph breaks at each call.
if _OPERATOR:
    _operator = torch.library.custom_op(
        "hvdlite::allreduce",
        _run_in_graph,
        mutates_args=(),
        schema="(Tensor tensor, str name, int op, float prescale, float postscale, "
        "int process_set) -> Tensor",
    )
    _operator.register_fake(_shape_in_graph)
    _operator.register_autograd(_gradient_in_graph, setup_context=_keep_arguments)
