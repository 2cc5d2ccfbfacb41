"""What Keras needs of its TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.tensorflow.library import collective_errors as collective_errors
from hvdlite.tensorflow.ops import Compression as Compression
from hvdlite.tensorflow.tape import reduce_gradients
from hvdlite.tensorflow.tracing import Reduction, in_xla_context, traced_as_it_is

outside_of_graphs = tf.init_scope  # What follows runs at once, also in a function that is traced.


@traced_as_it_is
def allreduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    *,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    **options: Any,
) -> list[Any]:
    """Reduce tensors, tf.IndexedSlices or None, which stays None, also in compiled functions."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return reduce_gradients(gradients, names, reduction, **options)


@traced_as_it_is
def call_with_arrays(
    call: Callable[..., list[Any]], tensors: Sequence[Any], like: Sequence[Any]
) -> list[Any]:
    """Call a function with dense arrays of tensors; return its arrays as tensors like `like`."""
    if in_xla_context():
        raise ArgumentError(
            "XLA cannot call the parameter servers; give compile() jit_compile=False"
        )
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    results = tf.numpy_function(call, dense, [variable.dtype for variable in like])
    return [
        tf.ensure_shape(one, variable.shape) for one, variable in zip(results, like, strict=True)
    ]


def refuse_strategy() -> None:
    """Refuse the scope of a strategy of tf.distribute that would distribute the variables."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        raise ArgumentError(
            f"hvd.DistributedOptimizer in the scope of a {type(strategy).__name__}: both would "
            "distribute the training; leave the strategy out, and start a rank for each device, "
            "with hvdlite-run -np N"
        )


def keep_apply(optimizer: Any) -> None:
    """Do nothing: TensorFlow calls the `apply` of an optimizer's own class."""


@traced_as_it_is
def scale_gradient(gradient: Any, factor: float) -> Any:
    return tf.math.scalar_mul(factor, gradient)  # It takes tf.IndexedSlices, too.
