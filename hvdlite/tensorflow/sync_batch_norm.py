"""Batch normalization with the moments of all ranks' batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow import requests
from hvdlite.tensorflow.tracing import Reduction, traced_as_it_is, wire_name


@keras.saving.register_keras_serializable(package="hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras's BatchNormalization, normalizing by the mean and variance over all ranks.

    Every sample counts the same, also if ranks have unequal batches, or one has none (except in
    functions of TensorFlow 2.16, which prunes the gradient that the other ranks wait for).
    Arguments, weights, moving averages and inference are those of
    `keras.layers.BatchNormalization`. Every rank calls its layers of this kind in the same order.
    The layer does not work with `jit_compile=True`, because a step waits for the other ranks once
    per layer, in both directions.

    Args:
        args: the arguments of `keras.layers.BatchNormalization`.
        fused: accepted for scripts written for Horovod; only False.
        process_set: only the batches of its members are combined; by default those of all ranks.
            It is not saved with a model.
        kwargs: the arguments of `keras.layers.BatchNormalization`, by name.

    Raises:
        ArgumentError: Keras's backend is not TensorFlow, or `fused` or `synchronized` is True.

    Example:
        >>> model = keras.Sequential([
        ...     keras.layers.Conv2D(16, 3), hvd.SyncBatchNormalization(), keras.layers.ReLU()])
    """

    def __init__(
        self,
        *args: Any,
        fused: bool = False,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise ArgumentError(
                "hvdlite.tensorflow.SyncBatchNormalization needs KERAS_BACKEND=tensorflow, "
                f"not {keras.backend.backend()}"
            )
        if kwargs.get("synchronized"):
            raise ArgumentError("synchronized=True is for tf.distribute; leave it out")
        if fused:
            raise ArgumentError("fused=True normalizes by one rank's batch only; leave it out")
        super().__init__(*args, **kwargs)
        self._process_set = process_set

    @traced_as_it_is
    def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute mean and variance by channel over the batches of all ranks."""
        axes = self._reduction_axes
        if mask is None:
            present = tf.ones([1] * inputs.shape.rank, inputs.dtype)
        else:
            present = tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        present = tf.broadcast_to(present, tf.shape(inputs))
        count = tf.reduce_sum(present, axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * present, axes), count)
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        deviation = (inputs - tf.reshape(mean, shape)) * present
        variance = tf.math.divide_no_nan(tf.reduce_sum(tf.square(deviation), axes), count)

        # Float64 is precise enough for the difference of squares: N = sum n, mean = sum(n mean) /
        # N, variance = sum(n (variance + mean^2)) / N - mean^2.
        n, mean, variance = (tf.cast(one, tf.float64) for one in (count, mean, variance))
        sums = tf.stack([n, n * mean, n * (variance + tf.square(mean))])
        wire = wire_name("sync_batch_norm", None, self._process_set)._replace(tensors=[self.path])
        (reduced,) = requests.allreduce([sums], wire, Reduction(ops.Sum))
        total, mean, square = tf.unstack(reduced)
        mean = tf.math.divide_no_nan(mean, total)
        variance = tf.maximum(tf.math.divide_no_nan(square, total) - tf.square(mean), 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
