"""`DistributedOptimizer` for TensorFlow: for optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.gradients.accumulation import Passes
from hvdlite.tensorflow.gradients.source_gradients import SourceGradients, source_gradients
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Reduces the gradients that an optimizer of TensorFlow 1 computes, and delegates the rest."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        gradients: SourceGradients,
        passes: Passes | None,
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._gradients = gradients
        self._passes = passes

    @traced_as_it_is
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute this rank's gradients; reduce them, or the sums of several passes."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        sources = [source for _, source in pairs]
        gradients = [gradient for gradient, _ in pairs]

        def reduce(gradients: list[Any]) -> list[Any]:
            return self._gradients.reduce(gradients, sources)

        if self._passes is None:
            reduced = reduce(gradients)
        else:
            reduced = self._passes.add(gradients, sources, reduce)
        return list(zip(reduced, sources, strict=True))

    def register_local_var(self, variable: Any) -> None:
        """Make a variable local: its gradient is not reduced. All ranks register the same ones."""
        self._gradients.local.append(variable)

    @traced_as_it_is
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Update the variables; with several passes per step, in the last pass."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, *args, **kwargs)

        if self._passes is None:
            return apply()
        return self._passes.then([gradient for gradient, _ in pairs], apply)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot variable of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the wrapped optimizer's slot variables."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: ops.Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer apply the gradients of all ranks.

    Optimizers of Keras are passed to `hvdlite.keras.DistributedOptimizer`, which describes the
    arguments. An optimizer of `tf.compat.v1.train` reduces in `compute_gradients`, and so in
    `minimize`.

    Args:
        optimizer: of Keras 3, of `tf_keras`, or of `tf.compat.v1.train`.
        name: the prefix of the gradients' names.
        use_locking: as for an optimizer of TensorFlow 1.
        device_dense: accepted for scripts written for Horovod; without effect.
        device_sparse: likewise.
        compression: as for `hvdlite.keras.DistributedOptimizer`.
        sparse_as_dense: likewise.
        backward_passes_per_step: likewise; in TensorFlow 1 `global_step` counts updates.
        op: likewise.
        gradient_predivide_factor: likewise.
        average_aggregated_gradients: likewise.
        num_groups: in TensorFlow 1, cuts the gradients into that many groups that travel together.
        groups: as `num_groups`, or a list of lists of variables: each list is one group.
        process_set: gradients are reduced over its members; other ranks apply their own.
        scale_local_gradients: divides the gradients of local variables by the number of ranks.

    Returns:
        The optimizer itself if it is one of Keras; for TensorFlow 1, an optimizer around it.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> with tf.Graph().as_default():
        ...     weight = tf.compat.v1.get_variable("weight", [3])
        ...     plain = tf.compat.v1.train.GradientDescentOptimizer(0.1 * hvd.size())
        ...     train = hvd.DistributedOptimizer(plain).minimize(tf.reduce_sum(weight**2))
    """
    basics.size()  # This raises an error without init().
    if isinstance(optimizer, _DistributedOptimizer):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        passes = _passes(backward_passes_per_step, average_aggregated_gradients)
        how = (compression, sparse_as_dense, op, gradient_predivide_factor)
        parts = num_groups if groups is None else groups
        gradients = source_gradients(
            *how, parts, process_set, scale_local_gradients, weight=None, name=name
        )
        return _DistributedOptimizer(optimizer, name, use_locking, gradients, passes)
    from hvdlite import keras

    return keras.DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def _passes(passes: int, average: bool) -> Passes | None:
    passes = ops.check_passes(passes)
    return None if passes == 1 else Passes(passes, average)
