"""The gradients of the collectives.

Each function here ties the output of a completed collective to its input, so that autograd calls
its backward, which is a collective itself and can be differentiated again. The formulas are
Horovod's; docs/collectives.md has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.submit import (
    Reduction,
    start_allgather,
    start_allreduce,
    start_alltoall,
    take_received,
)
from hvdlite.torch.collectives.tensors import note_written, readable, spec


def tie(
    function: Any, tensor: torch.Tensor, output: torch.Tensor, *arguments: object
) -> torch.Tensor:
    """Make `output` depend on `tensor` if autograd needs it; return `output`.

    A leaf that was overwritten in place is not tied, because scripts overwrite parameters outside
    of any graph.
    """
    in_place = output is tensor
    if tensor.requires_grad and torch.is_grad_enabled() and not (in_place and tensor.is_leaf):
        # `output` is in a list, because autograd would otherwise see a second input.
        tied: torch.Tensor = function.apply(tensor, [output], *arguments)
        return tied
    if in_place:
        note_written([tensor])
    return output


def reduce(tensor: torch.Tensor, name: str, reduction: Reduction) -> torch.Tensor:
    """Reduce one checked tensor into a new one, and wait; differentiable."""
    source = readable(tensor)
    output = torch.empty_like(source)
    start_allreduce(
        name,
        [spec(name, source, output, reduction.wire)],
        reduction,
        keep=(source, output),
        blocking=True,
    ).wait()
    return tie(Reduced, tensor, output, name, reduction)


def _combine(tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet) -> torch.Tensor:
    return reduce(tensor, name, Reduction(op, process_set=process_set))


def gather(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, and wait; differentiable."""
    source = readable(tensor)
    specs = [spec(name, source, None)]
    handle = start_allgather(name, specs, process_set, keep=source, blocking=True)
    handle.wait()
    (received,) = take_received(handle, [source])
    return tie(Gathered, tensor, received.tensor, name, received.rows, process_set)


def exchange(
    tensor: torch.Tensor, name: str, splits: Sequence[int], process_set: ProcessSet
) -> torch.Tensor:
    """Send rows to each rank, wait, and return the rows that come back; differentiable."""
    source = readable(tensor)
    one = spec(name, source, None)
    handle = start_alltoall(name, one, splits, process_set, keep=source, blocking=True)
    handle.wait()
    (received,) = take_received(handle, [source])
    return tie(Exchanged, tensor, received.tensor, name, received.rows, process_set)


def _check_differentiable(verb: str, name: str, op: int) -> None:
    if op not in (ops.Average, ops.Sum):
        raise ArgumentError(
            f"{verb} '{name}' with op=hvd.{ops.op_name(op)} has no gradient; "
            "use hvd.Average or hvd.Sum, or detach() the input"
        )


def _forward(ctx: Any, tensor: torch.Tensor, result: Sequence[torch.Tensor]) -> torch.Tensor:
    if result[0] is tensor:
        ctx.mark_dirty(tensor)
    return result[0]


class Reduced(torch.autograd.Function):  # type: ignore[misc]
    """Ties the result of an allreduce."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        name: str,
        reduction: Reduction,
    ) -> torch.Tensor:
        """Return the result."""
        ctx.name, ctx.reduction = name, reduction
        return _forward(ctx, tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Reduce the gradients in the same way; with weights, each rank takes its share."""
        name, reduction = f"{ctx.name}.backward", ctx.reduction
        _check_differentiable("allreduce", ctx.name, reduction.op)
        if reduction.weight is not None:
            weight = torch.tensor(reduction.weight, dtype=torch.float64)
            total = float(_combine(weight, f"{name}.weight", ops.Sum, reduction.process_set))
            gradient = reduce(gradient, name, reduction._replace(op=ops.Sum, weight=None))
            return gradient * (reduction.weight / total if total else 0.0), None, None, None
        return reduce(gradient, name, reduction), None, None, None


class Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Ties the result of an allgather."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        name: str,
        first_dimensions: Sequence[int],
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Return the result."""
        ctx.name, ctx.first_dimensions, ctx.process_set = name, first_dimensions, process_set
        return _forward(ctx, tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Average the ranks' gradients and take the rows that this rank gave."""
        mean = _combine(gradient, f"{ctx.name}.backward", ops.Average, ctx.process_set)
        index = ctx.process_set.rank()
        start = sum(ctx.first_dimensions[:index])
        return mean[start : start + ctx.first_dimensions[index]], None, None, None, None


class Scattered(torch.autograd.Function):  # type: ignore[misc]
    """Ties the result of a reducescatter."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        name: str,
        reduction: Reduction,
        members: int,
    ) -> torch.Tensor:
        """Return the result."""
        ctx.name, ctx.reduction, ctx.members = name, reduction, members
        return _forward(ctx, tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Gather the gradients of all rows from the ranks, with the same scales.

        For a sum they are multiplied by the number of ranks.
        """
        reduction = ctx.reduction
        _check_differentiable("reducescatter", ctx.name, reduction.op)
        factor = reduction.prescale * reduction.postscale
        if reduction.op == ops.Sum:
            factor *= ctx.members
        name = f"{ctx.name}.backward"
        return gather(gradient * factor, name, reduction.process_set), None, None, None, None


class Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """Ties the result of an alltoall."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        name: str,
        received_splits: Sequence[int],
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Return the result."""
        ctx.name, ctx.received_splits, ctx.process_set = name, received_splits, process_set
        return _forward(ctx, tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Send the gradient of each row back to the rank that sent the row."""
        name = f"{ctx.name}.backward"
        back = exchange(gradient, name, ctx.received_splits, ctx.process_set)
        return back, None, None, None, None


class Broadcast(torch.autograd.Function):  # type: ignore[misc]
    """Ties the result of a broadcast."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        name: str,
        root_rank: int,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Return the result."""
        ctx.name, ctx.root_rank, ctx.process_set = name, root_rank, process_set
        return _forward(ctx, tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Average the ranks' gradients on the root; the inputs of the others had no effect."""
        mean = _combine(gradient, f"{ctx.name}.backward", ops.Average, ctx.process_set)
        if ctx.process_set.ranks[ctx.process_set.rank()] != ctx.root_rank:
            mean = torch.zeros_like(mean)
        return mean, None, None, None, None
