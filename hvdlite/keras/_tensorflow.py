"""The adapter of hvdlite.keras for the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.compression import Compressor
from hvdlite.process_sets import ProcessSet
from hvdlite.tensorflow.collectives.requests import Reduction
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.errors import collective_errors
from hvdlite.tensorflow.gradients.gradient_lists import reduce_gradients
from hvdlite.tensorflow.graph.tracing import traced_as_it_is

__all__ = [
    "Compression",
    "allreduce_gradients",
    "collective_errors",
    "keep_apply",
    "scale_gradient",
]


@traced_as_it_is
def allreduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    *,
    op: int,
    compression: type[Compressor] | Compressor,
    prescale_factor: float,
    postscale_factor: float,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> list[Any]:
    """Reduce gradients over all ranks, eagerly, in a function, or in a function that XLA compiles.

    Args:
        gradients: tensors, tf.IndexedSlices, or None, which stays None.
        names: their wire names, the same in every step and at every trace.
        op: `Average` or `Sum`.
        compression: how gradients are compressed while they travel.
        prescale_factor: multiplies the input.
        postscale_factor: multiplies the result.
        sparse_as_dense: makes tf.IndexedSlices dense tensors.
        process_set: gradients are reduced over its members.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return reduce_gradients(
        gradients, names, reduction, compression, sparse_as_dense, process_set=process_set
    )


def keep_apply(optimizer: Any) -> None:
    """Do nothing: TensorFlow calls the `apply` of an optimizer's own class."""


@traced_as_it_is
def scale_gradient(gradient: Any, factor: float) -> Any:
    """Multiply a tensor or tf.IndexedSlices."""
    return tf.math.scalar_mul(factor, gradient)
