"""Gradients of several passes, summed on this rank, for the optimizers of TensorFlow 1.

Optimizers of Keras use `hvdlite.keras.accumulation`. This module also works in a graph of
TensorFlow 1, whose script initialises and saves variables by collection: the variables of this
module are in no collection, and need no initialiser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Passes:
    """Sums the gradients of several passes: eagerly, in functions, in graphs of TensorFlow 1."""

    def __init__(self, passes: int, average: bool) -> None:
        """Make empty sums; `average` gives an update the mean of its passes instead of the sum."""
        self._passes = passes
        self._scale = 1.0 / passes if average else 1.0
        self._count: Any = None
        self._sums: dict[Any, Any] = {}  # The keys are variables.

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        reduce: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Add one pass; return what `reduce` returns after the last pass, else the sums so far."""
        if self._count is None:
            self._count = _variable("hvdlite_passes", [], tf.int32)
        count = _read(self._count)
        totals = [
            None if gradient is None else self._add(gradient, variable, count)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        present = [i for i, total in enumerate(totals) if total is not None]
        with tf.control_dependencies([totals[i] for i in present]):
            count = tf.identity(self._count.assign((count + 1) % self._passes))

        # `reduce` gets dense tensors, and None for variables without a gradient. A graph traces it
        # once.
        def update() -> list[Any]:
            scaled = [
                None if one is None else one * tf.cast(self._scale, one.dtype) for one in totals
            ]
            reduced = reduce(scaled)
            return [tf.identity(reduced[i]) for i in present]

        def wait() -> list[Any]:
            return [tf.identity(totals[i]) for i in present]

        results: list[Any] = [None] * len(totals)
        for i, result in zip(present, tf.cond(tf.equal(count, 0), update, wait), strict=True):
            results[i] = result
        return results

    def then(self, gradients: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """Call `apply`, which updates variables, if `add` has reduced; a graph gets an op."""
        if self._count is None:
            return apply()
        with tf.control_dependencies([one for one in gradients if one is not None]):
            complete = tf.equal(_read(self._count), 0)
        if tf.executing_eagerly():
            return apply() if complete else None

        def apply_in_graph() -> tf.Tensor:
            with tf.control_dependencies([apply()]):
                return tf.constant(True)

        return tf.cond(complete, apply_in_graph, lambda: tf.constant(False)).op

    def _add(self, gradient: Any, variable: Any, count: tf.Tensor) -> tf.Tensor:
        """Return the new sum after storing it; the first pass overwrites the last update's sum."""
        gradient = tf.convert_to_tensor(gradient)
        key = variable.ref()
        if key not in self._sums:
            self._sums[key] = _variable("hvdlite_sum", variable.shape, gradient.dtype)
        kept = self._sums[key]
        total = tf.cond(tf.equal(count, 0), lambda: tf.identity(gradient), lambda: kept + gradient)
        return tf.identity(kept.assign(total))


def _variable(name: str, shape: Any, dtype: tf.DType) -> Any:
    with tf.init_scope():
        return tf.compat.v1.Variable(
            lambda: tf.zeros(shape, dtype),
            trainable=False,
            collections=[],
            name=name,
            use_resource=True,
        )


def _read(variable: Any) -> tf.Tensor:
    """Return a variable's value; zero in a session that has never written it."""
    is_written = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
    return tf.cond(
        is_written, variable.read_value, lambda: tf.zeros(variable.shape, variable.dtype)
    )
