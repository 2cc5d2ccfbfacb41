"""Reduces tf.IndexedSlices: gathers their rows.

Rows of equal indices are added up before anything is sent, and those of a gradient when they have
arrived, too.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import _core, ops
from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.tensorflow.requests import allgather, allgather_sizes, allreduce, check
from hvdlite.tensorflow.tracing import Reduction, WireName, in_xla_context


def allreduce_slices(
    slices: tf.IndexedSlices, wire: WireName, reduction: Reduction, compression: Any
) -> tf.IndexedSlices:
    """Gather the rows and the indices of all ranks; equal indices of ranks are not added up."""
    if reduction.op not in (ops.Average, ops.Sum):
        raise UnsupportedError(
            f"'{wire.text}' is tf.IndexedSlices, whose rows can be averaged or summed; "
            "use sparse_as_dense=True for other operations"
        )
    if in_xla_context():
        raise ArgumentError(
            f"'{wire.text}' is tf.IndexedSlices, whose rows XLA cannot gather; "
            "use sparse_as_dense=True, or jit_compile=False"
        )
    merged = _merge(slices, wire.text)
    values, indices = _gather(merged, wire, reduction, compression)
    return tf.IndexedSlices(values, indices, dense_shape=merged.dense_shape)


def reduce_sparse_gradient(
    gradient: tf.IndexedSlices, wire: WireName, reduction: Reduction, compression: Any
) -> tf.IndexedSlices:
    """Gather the rows of all ranks, and add up those of equal indices."""
    # Ranks may have the same index. Keras' optimizers square each row of a gradient alone.
    rows = _merge(allreduce_slices(gradient, wire, reduction, compression), wire.text)
    values = tf.cast(rows.values, gradient.values.dtype)
    return tf.IndexedSlices(values, rows.indices, dense_shape=rows.dense_shape)


def _merge(slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
    """Add up the rows of equal indices."""
    values = check(slices.values, name)
    indices, places = tf.unique(tf.convert_to_tensor(slices.indices))
    values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    shape = slices.dense_shape  # A script may give a tuple, of which a graph can make no result.
    shape = None if shape is None else tf.convert_to_tensor(shape)
    return tf.IndexedSlices(values, indices, dense_shape=shape)


def _gather(
    merged: tf.IndexedSlices, wire: WireName, reduction: Reduction, compression: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows of all ranks, each row scaled, and their indices."""
    values, indices = merged.values, merged.indices
    if reduction.weight is not None and values.dtype.is_integer:
        # Equal indices are added up later, so the average of each integer row must not be rounded.
        values = tf.cast(values, tf.float64)
    factor = tf.constant(reduction.prescale * reduction.postscale, tf.float64)
    if reduction.weight is not None:
        weight = tf.cast(reduction.weight, tf.float64)
        (total,) = allreduce([weight], wire.plus("weight"), Reduction(ops.Sum))
        factor *= tf.math.divide_no_nan(weight, total)
    sent, context = compression.compress(_scaled(values, factor))
    values_wire, indices_wire = wire.plus("values"), wire.plus("indices")
    (gathered,) = allgather([sent], values_wire)
    # Each rank sends one extra index, so that the sizes show which ranks take part without rows.
    ends = tf.constant([-1], indices.dtype)
    indices, sizes = allgather_sizes(tf.concat([indices, ends], axis=0), indices_wire)
    indices = tf.boolean_mask(indices, indices >= 0)
    result = compression.decompress(gathered, context)
    if reduction.op == ops.Average and reduction.weight is None:
        over_all = _core.knob_values()["average_over_joined"]
        ranks = tf.size(sizes) if over_all else tf.math.count_nonzero(sizes)
        result = tf.divide(result, tf.cast(ranks, result.dtype))
    return result, indices


def _scaled(rows: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiply rows by a float64; integers are scaled in float64 and rounded towards zero."""
    if rows.dtype.is_integer:
        return tf.cast(tf.cast(rows, tf.float64) * factor, rows.dtype)
    return rows * tf.cast(factor, rows.dtype)
