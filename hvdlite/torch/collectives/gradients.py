"""How the collectives enter autograd's graph.

`tie` makes the output of a completed collective depend on its input. Autograd then calls the
gradient function that the collective gave, which is a collective itself and can be differentiated
again. The formulas are Horovod's; docs/collectives.md has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.torch.collectives.tensors import note_written


def tie(
    tensor: torch.Tensor,
    output: torch.Tensor,
    backward: Callable[..., torch.Tensor],
    *arguments: object,
) -> torch.Tensor:
    """Make `output` depend on `tensor` if autograd needs it; return `output`."""
    # In place both are one tensor. A leaf that was overwritten in place is not tied, because
    # scripts overwrite parameters outside of any graph. `backward` gets the gradient of `output`
    # and the arguments, neither of which is one of the tensors, and returns the gradient of
    # `tensor`.
    in_place = output is tensor
    if tensor.requires_grad and torch.is_grad_enabled() and not (in_place and tensor.is_leaf):
        # `output` is in a list, because autograd would otherwise see a second input.
        tied: torch.Tensor = Collective.apply(tensor, [output], backward, arguments)
        return tied
    if in_place:
        note_written([tensor])
    return output


def check_differentiable(verb: str, name: str, op: int) -> None:
    """Refuse the backward of a reduction that has none: `op` is neither `Average` nor `Sum`."""
    if op not in (ops.Average, ops.Sum):
        raise ArgumentError(
            f"{verb} '{name}' with op=hvd.{ops.op_name(op)} has no gradient; "
            "use hvd.Average or hvd.Sum, or detach() the input"
        )


class Collective(torch.autograd.Function):  # type: ignore[misc]
    """Ties the result of a completed collective to the tensor that went in."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        backward: Callable[..., torch.Tensor],
        arguments: Sequence[object],
    ) -> torch.Tensor:
        """Return the result."""
        ctx.gradient_of, ctx.arguments = backward, arguments
        if result[0] is tensor:
            ctx.mark_dirty(tensor)
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of the tensor."""
        return ctx.gradient_of(gradient, *ctx.arguments), None, None, None
