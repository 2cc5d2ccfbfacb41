"""The gradients of the operations, registered with TensorFlow when this module is imported.

They are Horovod's: if a rank's input went to all ranks, its gradient is the mean of the gradients
that these ranks have for it (docs/collectives.md has the formulas). Each gradient is a collective
itself, with the `call_scalars` of its operation, and can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import ops
from hvdlite.tensorflow.requests import (
    allgather_with,
    allreduce_with,
    alltoall_with,
    as_dtypes_of,
    check_differentiable,
    query,
    take_turns,
)
from hvdlite.tensorflow.tracing import WireName


def _wire_of(operation: Any) -> WireName:
    text = str(tf.compat.as_str_any(operation.get_attr("tensor_name")))
    return WireName(text, process_set=int(operation.get_attr("process_set")))


def _reduce(
    operation: Any, gradients: tuple[Any, ...], op: int, cast: int | None = None
) -> list[tf.Tensor]:
    dense = as_dtypes_of(operation.outputs, gradients)
    wire = _wire_of(operation).derived("gradient").grouped(len(dense))
    return take_turns(wire, allreduce_with(operation.inputs[-1], dense, wire, op, cast))


@tf.RegisterGradient("HvdliteAllreduce")  # type: ignore[untyped-decorator]
def _gradients_of_allreduce(operation: Any, *gradients: Any) -> list[Any]:
    """Reduce the gradients in the same way, with the same scales and the same cast."""
    op = int(operation.get_attr("op"))
    check_differentiable(_wire_of(operation).text, op)
    cast = int(operation.get_attr("wire"))
    return [*_reduce(operation, gradients, op, None if cast < 0 else cast), None]


@tf.RegisterGradient("HvdliteAllgather")  # type: ignore[untyped-decorator]
def _gradients_of_allgather(operation: Any, *gradients: Any) -> list[Any]:
    """Average the ranks' gradients and take the rows that this rank gave."""
    means = _reduce(operation, gradients[:-1], ops.Average)  # The last output has the sizes.
    rank = query("rank", _wire_of(operation).process_set)
    results = []
    for index, mean in enumerate(means):
        sizes = operation.outputs[-1][index]
        start = tf.reduce_sum(sizes[:rank])
        own = mean[start : start + sizes[rank]]
        own.set_shape(operation.inputs[index].shape)
        results.append(own)
    return [*results, None]


@tf.RegisterGradient("HvdliteReducescatter")  # type: ignore[untyped-decorator]
def _gradients_of_reducescatter(operation: Any, *gradients: Any) -> list[Any]:
    """Gather the ranks' gradients, with the same scales; for a sum times the number of ranks."""
    op = int(operation.get_attr("op"))
    wire = _wire_of(operation)
    check_differentiable(wire.text, op, "reducescatter")
    last = operation.inputs[-1]
    factor = last[1] * last[2]
    if op == ops.Sum:
        factor *= tf.cast(query("size", wire.process_set), tf.float64)
    back = wire.derived("gradient").grouped(len(gradients))
    dense = as_dtypes_of(operation.outputs, gradients)
    scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in dense]
    results = take_turns(back, allgather_with(last, scaled, back)[0])
    for result, tensor in zip(results, operation.inputs, strict=False):
        result.set_shape(tensor.shape)
    return [*results, None]


@tf.RegisterGradient("HvdliteAlltoall")  # type: ignore[untyped-decorator]
def _gradients_of_alltoall(operation: Any, gradient: Any, _: Any) -> list[Any]:
    """Send the gradient of each row back to the rank that sent the row."""
    wire = _wire_of(operation).derived("gradient")
    (dense,) = as_dtypes_of(operation.outputs, [gradient])
    back, _ = alltoall_with(operation.inputs[-1], dense, operation.outputs[1], wire)
    take_turns(wire, [back])
    back.set_shape(operation.inputs[0].shape)
    return [back, None, None]


@tf.RegisterGradient("HvdliteBroadcast")  # type: ignore[untyped-decorator]
def _gradients_of_broadcast(operation: Any, *gradients: Any) -> list[Any]:
    """Average the ranks' gradients on the root; the inputs of the others had no effect."""
    means = _reduce(operation, gradients, ops.Average)
    is_root = tf.equal(query("rank"), int(operation.get_attr("root")))
    return [*(tf.where(is_root, mean, tf.zeros_like(mean)) for mean in means), None]
