"""The two operations of tensor parallel layers, f and g of Megatron-LM (Shoeybi et al. 2019).

`copy_to` does nothing forward, and sums gradients backward; `reduce_from` sums forward, and does
nothing backward. Each is the gradient of the other. `allreduce` cannot take the place of
`reduce_from`: its gradient sums what all ranks have alike once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdlite import ops as neutral
from hvdlite.process_sets import ProcessSet
from hvdlite.tensorflow.collectives import requests
from hvdlite.tensorflow.collectives.requests import Reduction, check
from hvdlite.tensorflow.graph.names import WireName, wire_name
from hvdlite.tensorflow.graph.tracing import traced_as_it_is

_WithGradient = tuple[tf.Tensor, Callable[[Any], tf.Tensor]]


def _copied(tensor: tf.Tensor, wire: WireName) -> tf.Tensor:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def copy(tensor: tf.Tensor) -> _WithGradient:
        def gradient(upstream: Any) -> tf.Tensor:
            return _reduced(tf.convert_to_tensor(upstream), wire.derived("gradient"))

        return tf.identity(tensor), gradient

    return copy(tensor)


def _reduced(tensor: tf.Tensor, wire: WireName) -> tf.Tensor:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(tensor: tf.Tensor) -> _WithGradient:
        def gradient(upstream: Any) -> tf.Tensor:
            return _copied(tf.convert_to_tensor(upstream), wire.derived("gradient"))

        results = requests.allreduce([tensor], wire, [wire.text], Reduction(neutral.Sum))
        requests.take_turns(wire, results)
        return results[0], gradient

    return reduce(tensor)


@traced_as_it_is
def copy_to(tensor: Any, process_set: ProcessSet, name: str | None = None) -> tf.Tensor:
    """Enter a tensor parallel layer: return the tensor, and sum its gradients.

    Args:
        tensor: the same on all members.
        process_set: the ranks that share the layer, such as `hvd.mesh(tp=2).tp`.
        name: identifies the operation on all members; a call without a name is numbered.

    Returns:
        A tensor with the same values. Its gradient is the sum of the members' gradients, each of
        which knows only one part of the weights.

    Raises:
        ArgumentError: the tensor cannot be sent, or, eagerly, this rank is not a member.

    Example:
        >>> half = tf.nn.relu(hvd.copy_to(x, mesh.tp) @ my_columns_of_the_weight)
        >>> y = hvd.reduce_from(half @ my_rows_of_the_next_weight, mesh.tp)
    """
    wire = wire_name("copy_to", name, process_set)
    return _copied(check(tensor, wire.text, neutral.Sum), wire)


@traced_as_it_is
def reduce_from(tensor: Any, process_set: ProcessSet, name: str | None = None) -> tf.Tensor:
    """Leave a tensor parallel layer: sum the members' tensors, and pass the gradient on unchanged.

    Args:
        tensor: this member's part of a sum.
        process_set: the ranks that share the layer.
        name: identifies the operation on all members; a call without a name is numbered.

    Returns:
        The sum, the same on all members. Its gradient is the same on all members, too, if they
        compute the same loss of it, and is then the gradient of each part.

    Raises:
        ArgumentError: the tensor cannot be sent, or, eagerly, this rank is not a member.
        tf.errors.FailedPreconditionError: the members' tensors differ in shape or dtype, when the
            operation runs; eagerly it is a MismatchError, too.

    Example:
        >>> y = hvd.reduce_from(half @ my_rows_of_the_weight, mesh.tp)
    """
    wire = wire_name("reduce_from", name, process_set)
    return _reduced(check(tensor, wire.text, neutral.Sum), wire)
