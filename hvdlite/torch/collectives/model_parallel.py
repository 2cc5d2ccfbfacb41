"""The two operations of tensor parallel layers, f and g of Megatron-LM (Shoeybi et al. 2019).

Between them each rank computes with its part of the weights. `copy_to` does nothing forward, and
sums gradients backward; `reduce_from` sums forward, and does nothing backward. Each is the gradient
of the other, so they can be differentiated again. `allreduce` cannot take the place of
`reduce_from`: its backward sums the gradients, which all ranks have alike, once more.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import ops as neutral
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import reduce
from hvdlite.torch.collectives.graph_breaks import outside_graphs
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import check, single


class _Copied(torch.autograd.Function):  # type: ignore[misc]
    """Passes a tensor on; its backward sums the gradients of the members."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
        """Return a view of the tensor, so that autograd refuses to overwrite it in place."""
        ctx.arguments = (f"{name}.backward", process_set)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Sum the gradients."""
        return _Reduced.apply(gradient, *ctx.arguments), None, None


class _Reduced(torch.autograd.Function):  # type: ignore[misc]
    """Sums the members' tensors; its backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
        """Return the sum."""
        ctx.arguments = (f"{name}.backward", process_set)
        return reduce(tensor, name, Reduction(neutral.Sum, process_set=process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient, which is the same on all members."""
        return _Copied.apply(gradient, *ctx.arguments), None, None


@outside_graphs
def copy_to(tensor: torch.Tensor, process_set: ProcessSet, name: str | None = None) -> torch.Tensor:
    """Enter a tensor parallel layer: return the tensor, and sum its gradients in backward.

    Args:
        tensor: the same on all members.
        process_set: the ranks that share the layer, such as `hvd.mesh(tp=2).tp`.
        name: identifies the operation on all members; a call without a name is numbered.

    Returns:
        A tensor with the same values. Its backward sums the members' gradients, each of which knows
        only one part of the weights.

    Raises:
        ArgumentError: the tensor cannot be sent, or this rank is not a member.

    Example:
        >>> half = activation(F.linear(hvd.copy_to(x, mesh.tp), my_rows_of_the_weight))
        >>> y = hvd.reduce_from(F.linear(half, my_columns_of_the_next_weight), mesh.tp)
    """
    named = single("copy_to", tensor, name, process_set)
    check(tensor, named.name)
    copied: torch.Tensor = _Copied.apply(tensor, named.name, process_set)
    return copied


@outside_graphs
def reduce_from(
    tensor: torch.Tensor, process_set: ProcessSet, name: str | None = None
) -> torch.Tensor:
    """Leave a tensor parallel layer: sum the members' tensors, and pass the gradient on unchanged.

    Args:
        tensor: this member's part of a sum.
        process_set: the ranks that share the layer.
        name: identifies the operation on all members; a call without a name is numbered.

    Returns:
        The sum, the same on all members. Its gradient is the same on all members, too, if they
        compute the same loss of it, and is then the gradient of each part.

    Raises:
        ArgumentError: the tensor cannot be sent, or this rank is not a member.
        MismatchError: the members' tensors differ in shape or dtype.

    Example:
        >>> y = hvd.reduce_from(F.linear(half, my_columns_of_the_weight), mesh.tp)
    """
    named = single("reduce_from", tensor, name, process_set)
    check(tensor, named.name)
    reduced: torch.Tensor = _Reduced.apply(tensor, named.name, process_set)
    return reduced
