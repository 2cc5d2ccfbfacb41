"""Reduces lists of gradients, for the tape and for Keras.

Each gradient has its own wire name. In a function each is its own operation, which starts as
soon as the gradient is ready. Eagerly an operation blocks, and under XLA it cannot overlap, so all
gradients travel in one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.ops import cast_in_core
from hvdlite.optimizers import check_finite, finite_level
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.collectives import requests
from hvdlite.tensorflow.collectives.requests import Reduction, check
from hvdlite.tensorflow.collectives.sparse import reduce_sparse_gradients
from hvdlite.tensorflow.graph import xla
from hvdlite.tensorflow.graph.names import WireName, set_number


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    reduction: Reduction,
    compression: Any,
    sparse_as_dense: bool = False,
    groups: Sequence[Sequence[int]] = (),
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce tensors, tf.IndexedSlices or None, which stays None, over a process set's members."""
    # In a function the gradients at the positions of one group travel together, the others alone.
    if process_set is not global_process_set and not process_set.included():
        return list(gradients)
    number = set_number(process_set)
    results: list[Any] = _checked(gradients, names) if finite_level() else list(gradients)
    cast, by_hand = cast_in_core(compression, reduction.op)
    contexts: dict[int, Any] = {}
    received: list[tf.Tensor] = []
    for i, gradient in enumerate(results):
        if gradient is None:
            continue
        if isinstance(gradient, tf.IndexedSlices):
            if not (sparse_as_dense or xla.in_xla_context()):
                continue
            gradient = tf.convert_to_tensor(gradient)
        gradient = check(gradient, names[i], reduction.op)
        results[i], contexts[i] = by_hand.compress(gradient)
    sparse = [i for i, one in enumerate(results) if isinstance(one, tf.IndexedSlices)]
    wires = [WireName(names[i], process_set=number) for i in sparse]
    rows = reduce_sparse_gradients([results[i] for i in sparse], wires, reduction, compression)
    for i, gradient in zip(sparse, rows, strict=True):
        results[i] = gradient
    reduction = reduction._replace(wire=cast)
    for positions, name in _parts(names, contexts, sparse, groups):
        tensors = [results[i] for i in positions]
        part = [names[i] for i in positions]
        reduced = requests.allreduce(tensors, WireName(name, process_set=number), part, reduction)
        received += reduced
        for i, tensor in zip(positions, reduced, strict=True):
            results[i] = by_hand.decompress(tensor, contexts[i])
    if received:
        requests.take_turns(WireName(names[0], process_set=number), received)
    return results


def _checked(gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the gradients, which wait for the check of HVDLITE_CHECK_FINITE."""
    if xla.in_xla_context():
        raise ArgumentError("HVDLITE_CHECK_FINITE does not work in XLA; use jit_compile=False")
    given = {name: one for name, one in zip(names, gradients, strict=True) if one is not None}
    values = [getattr(one, "values", one) for one in given.values()]
    check = tf.numpy_function(
        lambda *finite: check_finite(names[0], zip(given, finite, strict=True)),
        [tf.reduce_all(tf.math.is_finite(one)) for one in values],
        [],
    )
    with tf.control_dependencies([check]):
        return [
            tf.IndexedSlices(tf.identity(one.values), one.indices, one.dense_shape)
            if isinstance(one, tf.IndexedSlices)
            else (None if one is None else tf.identity(one))
            for one in gradients
        ]


def _parts(
    names: Sequence[str],
    dense: dict[int, Any],
    sparse: Sequence[int],
    groups: Sequence[Sequence[int]],
) -> list[tuple[list[int], str]]:
    """Divide the dense gradients into requests: the positions and the name of each request."""
    if tf.executing_eagerly() or xla.in_xla_context():
        groups = [range(len(names))]
    grouped = {i for group in groups for i in group}
    parts = [([i], names[i]) for i in dense if i not in grouped]
    # A group has the name of its first member, even if that has no gradient on this rank. So ranks
    # with different gradients or groups make requests of one name, and get a mismatch error. A
    # first member that is sparse has a request of that name itself.
    for group in groups:
        positions = [i for i in group if i in dense]
        if positions:
            own = ".group" if group[0] in sparse else ""
            parts.append((positions, names[group[0]] + own))
    return parts
