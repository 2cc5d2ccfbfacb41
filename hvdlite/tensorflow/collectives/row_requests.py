"""As `requests`, for the collectives whose results may have another number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.tensorflow.collectives.requests import (
    Reduction,
    attributes,
    per_dtype,
    refuse_xla,
    take_turns,
)
from hvdlite.tensorflow.graph.library import raw_ops
from hvdlite.tensorflow.graph.names import WireName, call_scalars


def _check(verb: str, tensors: Sequence[tf.Tensor], names: Sequence[str]) -> None:
    for tensor, name in zip(tensors, names, strict=True):
        refuse_xla(verb, name)
        if tensor.shape.rank == 0:
            raise ArgumentError(f"{verb} '{name}' of a scalar; use tf.reshape(tensor, [1])")


def allgather(
    tensors: Sequence[tf.Tensor], wire: WireName, names: Sequence[str]
) -> list[tf.Tensor]:
    """Gather checked tensors; those of one dtype complete together."""
    _check("allgather", tensors, names)
    last = call_scalars(wire.number)

    def call(part: list[tf.Tensor], wire: WireName, names: list[str]) -> Sequence[tf.Tensor]:
        return allgather_with(last, part, wire, names)

    outputs = per_dtype(tensors, wire, names, call)
    take_turns(wire, outputs)
    return outputs


def allgather_sizes(tensor: tf.Tensor, wire: WireName) -> tuple[tf.Tensor, tf.Tensor]:
    """Gather one checked tensor; return also the number of rows of each rank (int64)."""
    _check("allgather", [tensor], [wire.text])
    (output,), sizes = raw_ops().hvdlite_allgather(
        [tensor], call_scalars(wire.number), **attributes(wire), tensor_names=[wire.text]
    )
    take_turns(wire, [output])
    return output, tf.reshape(sizes, [-1])


def allgather_with(
    last: tf.Tensor, tensors: Sequence[tf.Tensor], wire: WireName, names: Sequence[str]
) -> list[tf.Tensor]:
    """Gather tensors of one dtype; `last` is the `call_scalars` of the operation."""
    outputs: list[tf.Tensor]
    outputs, _ = raw_ops().hvdlite_allgather(
        tensors, last, **attributes(wire), tensor_names=list(names)
    )
    return outputs


def reducescatter(
    tensors: Sequence[tf.Tensor], wire: WireName, names: Sequence[str], reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce checked tensors and return this rank's rows; those of one dtype complete together."""
    _check("reducescatter", tensors, names)
    last = call_scalars(wire.number, reduction.prescale, reduction.postscale)

    def call(part: list[tf.Tensor], wire: WireName, names: list[str]) -> Sequence[tf.Tensor]:
        outputs: list[tf.Tensor] = raw_ops().hvdlite_reducescatter(
            part, last, **attributes(wire), tensor_names=names, op=reduction.op
        )
        return outputs

    outputs = per_dtype(tensors, wire, names, call)
    take_turns(wire, outputs)
    return outputs


def alltoall(tensor: tf.Tensor, splits: tf.Tensor, wire: WireName) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to each rank; return the rows from all, and how many came from each."""
    # `splits` and the second result are int64. Empty splits give each rank the same number of rows.
    _check("alltoall", [tensor], [wire.text])
    output, received = alltoall_with(call_scalars(wire.number), tensor, splits, wire)
    take_turns(wire, [output])
    return output, received


def alltoall_with(
    last: tf.Tensor, tensor: tf.Tensor, splits: tf.Tensor, wire: WireName
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to each rank; `last` is the `call_scalars` of the operation."""
    output, received = raw_ops().hvdlite_alltoall(tensor, splits, last, **attributes(wire))
    return output, received
