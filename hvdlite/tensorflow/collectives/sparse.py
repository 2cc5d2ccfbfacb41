"""Reduces tf.IndexedSlices: gathers rows or, for gradients, sends them dense if that is cheaper.

Rows of equal indices are added up before anything is sent, and those of a gradient when they have
arrived, too. An allreduce then sums the ranks' numbers of rows. The sum is the same on every rank,
so all ranks choose alike between rows and dense. In a function this costs no time: a gradient's
indices are known before its values, often before the forward pass, so the sum is ready before the
values are. A gradient that travelled dense becomes rows again, so that an optimizer treats it in
the same way. The rule for the choice is in `hvdlite.sparse`, which PyTorch shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import _core, ops, sparse
from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.tensorflow.collectives import requests
from hvdlite.tensorflow.collectives.requests import Reduction, check
from hvdlite.tensorflow.collectives.row_requests import allgather, allgather_sizes
from hvdlite.tensorflow.graph import xla
from hvdlite.tensorflow.graph.names import WireName

_said: set[str] = set()  # `_say_dense` has logged these names.


def allreduce_slices(
    slices: tf.IndexedSlices, wire: WireName, reduction: Reduction, compression: Any
) -> tf.IndexedSlices:
    """Gather the rows and the indices of all ranks; equal indices of ranks are not added up."""
    if not _can_gather(reduction):
        raise UnsupportedError(
            f"'{wire.text}' is tf.IndexedSlices, whose rows can be averaged or summed; "
            "use sparse_as_dense=True for other operations"
        )
    if xla.in_xla_context():
        raise ArgumentError(
            f"'{wire.text}' is tf.IndexedSlices, whose rows XLA cannot gather; "
            "use sparse_as_dense=True, or jit_compile=False"
        )
    merged = _merge(slices, wire.text)
    values, indices = _gather(merged, wire, reduction, compression)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def reduce_sparse_gradients(
    gradients: Sequence[tf.IndexedSlices],
    wires: Sequence[WireName],
    reduction: Reduction,
    compression: Any,
) -> list[tf.IndexedSlices]:
    """Reduce gradients, each as rows or dense, whichever moves fewer bytes; not for XLA."""
    if not gradients:
        return []
    merged = [_merge(one, wire.text) for one, wire in zip(gradients, wires, strict=True)]
    how = (reduction, compression)
    if not _can_gather(reduction):
        # Only rows of averages and sums can be gathered; all other gradients travel dense.
        pairs = [_reduce_dense(one, wire, *how) for one, wire in zip(merged, wires, strict=True)]
    else:
        pairs = [
            _reduce_cheaply(one, counts, wire, *how)
            for one, counts, wire in zip(merged, _count(merged, wires), wires, strict=True)
        ]
    return [
        tf.IndexedSlices(*pair, dense_shape=one.dense_shape)
        for pair, one in zip(pairs, merged, strict=True)
    ]


def _can_gather(reduction: Reduction) -> bool:
    return reduction.op in (ops.Average, ops.Sum)


def _merge(slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
    """Add up the rows of equal indices."""
    values = check(slices.values, name)
    indices, places = tf.unique(tf.convert_to_tensor(slices.indices))
    values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _count(merged: Sequence[tf.IndexedSlices], wires: Sequence[WireName]) -> list[tf.Tensor]:
    """Sum three numbers of each gradient over all ranks: its rows, its dense limit, and one."""
    # A gradient travels dense if it has at least as many rows as its dense limit. In a function the
    # numbers travel as soon as they are ready; eagerly all travel together.
    totals: list[tf.Tensor] = []
    everything = range(len(merged))
    for part in [everything] if tf.executing_eagerly() else [[i] for i in everything]:
        numbers = [
            tf.stack([tf.size(merged[i].indices, tf.int64), _dense_from(merged[i]), 1])
            for i in part
        ]
        parts = [wires[i].plus("rows") for i in part]
        names = [one.text for one in parts]
        totals += requests.allreduce(numbers, parts[0], names, Reduction(ops.Sum))
        requests.take_turns(parts[0], totals[-len(numbers) :])
    return totals


def _reduce_cheaply(
    merged: tf.IndexedSlices,
    counts: tf.Tensor,
    wire: WireName,
    reduction: Reduction,
    compression: Any,
) -> Any:
    """Choose rows or dense from the summed counts only, and reduce."""
    # So all ranks choose alike even if their shapes differ by mistake, and get a mismatch error.
    rows, limits, ranks = tf.unstack(counts)

    def gathered() -> Any:
        # Ranks may have the same index. Keras' optimizers square each row of a gradient alone.
        values, indices = _gather(merged, wire, reduction, compression)
        rows = _merge(tf.IndexedSlices(values, indices), wire.text)
        return tf.cast(rows.values, merged.values.dtype), rows.indices

    def dense() -> Any:
        with tf.control_dependencies(_say_dense(wire.text, rows)):
            return _reduce_dense(merged, wire, reduction, compression)

    if not _has_shape(merged):
        return gathered()
    return tf.cond(rows * ranks < limits, gathered, dense)


def _has_shape(slices: tf.IndexedSlices) -> bool:
    shape = slices.dense_shape
    return shape is not None and shape.shape.is_fully_defined()


def _dense_from(slices: tf.IndexedSlices) -> Any:
    """Return the dense limit of `_count`; a number that is never reached if it has no shape."""
    if not _has_shape(slices):
        return 1 << 40
    known = tf.get_static_value(slices.dense_shape)
    shape = tf.unstack(tf.cast(slices.dense_shape, tf.int64)) if known is None else map(int, known)
    rows, *rest = shape
    row_bytes = math.prod(rest, start=slices.values.dtype.size)
    return sparse.dense_from(row_bytes, rows * row_bytes)


def _say_dense(name: str, rows: tf.Tensor) -> list[Any]:
    """Log once that a gradient travels dense; a graph does so when it runs, if INFO is logged."""

    def say(rows: Any) -> Any:
        if name not in _said:
            _said.add(name)
            sparse.say_dense(name, int(rows))
        return rows

    if tf.executing_eagerly():
        say(rows)
    elif name not in _said and sparse.hears_dense():
        return [tf.numpy_function(say, [rows], tf.int64)]
    return []


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
        part = wire.plus("weight")
        (total,) = requests.allreduce([weight], part, [part.text], Reduction(ops.Sum))
        requests.take_turns(part, [total])
        factor *= tf.math.divide_no_nan(weight, total)
    sent, context = compression.compress(_scaled(values, factor))
    values_wire, indices_wire = wire.plus("values"), wire.plus("indices")
    (gathered,) = allgather([sent], values_wire, [values_wire.text])
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


def _reduce_dense(
    merged: tf.IndexedSlices, wire: WireName, reduction: Reduction, compression: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reduce as a dense tensor; return its rows that are not zero, and their indices."""
    if merged.dense_shape is None:
        raise UnsupportedError(
            f"'{wire.text}' is tf.IndexedSlices without a dense_shape, whose rows can be averaged "
            "or summed; give it one for other operations"
        )
    rows = merged.dense_shape[0]
    dense = tf.math.unsorted_segment_sum(merged.values, merged.indices, rows)
    (total,) = requests.allreduce_compressed([dense], wire, [wire.text], reduction, compression)
    touched = tf.reduce_any(tf.not_equal(total, 0), axis=tf.range(1, tf.rank(total)))
    indices = tf.reshape(tf.where(touched), [-1])
    return tf.gather(total, indices), tf.cast(indices, merged.indices.dtype)
