"""The adapter of hvdlite.keras for the TensorFlow backend."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import basics
from hvdlite.compression import Compressor
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet
from hvdlite.tensorflow.collectives.requests import Reduction
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.errors import collective_errors
from hvdlite.tensorflow.gradients.gradient_lists import reduce_gradients
from hvdlite.tensorflow.graph import xla
from hvdlite.tensorflow.graph.tracing import traced_as_it_is
from hvdlite.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Compression",
    "allreduce_gradients",
    "call_with_arrays",
    "check_machine",
    "collective_errors",
    "describe_machine",
    "keep_apply",
    "outside_of_graphs",
    "prepare_virtual_ranks",
    "refuse_strategy",
    "scale_gradient",
    "seed_backend",
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
    """Reduce tensors, tf.IndexedSlices or None, which stays None, also in compiled functions."""
    # A gradient has the same wire name in every step and at every trace.
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return reduce_gradients(
        gradients, names, reduction, compression, sparse_as_dense, process_set=process_set
    )


# This leaves a function that is being traced, so that what follows runs at once.
outside_of_graphs = tf.init_scope


@traced_as_it_is
def call_with_arrays(
    call: Callable[..., list[Any]], tensors: Sequence[Any], like: Sequence[Any]
) -> list[Any]:
    """Call a function with dense arrays of tensors; return its arrays as tensors like `like`."""
    if xla.in_xla_context():
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
    """Multiply a tensor or tf.IndexedSlices."""
    return tf.math.scalar_mul(factor, gradient)


def prepare_virtual_ranks(model: Any, threads: int) -> None:
    """Compare the number of threads; refuse what would not have the same bits."""
    found = tf.config.threading.get_intra_op_parallelism_threads()
    if found != threads:
        raise ArgumentError(
            f"virtual_steps(): TensorFlow has {found or 'as many threads as there are cores'}"
            f"{' threads' if found else ''}, and threads={threads}: sums would have other bits; "
            f"call tf.config.threading.set_intra_op_parallelism_threads({threads}) before the "
            "first operation"
        )
    if basics.size() > 1 and tf.config.get_visible_devices("GPU"):
        raise ArgumentError(
            "virtual_steps(): gradients of GPUs are computed in an order of their own; train on "
            "one GPU, or on CPUs"
        )
    if any(isinstance(layer, SyncBatchNormalization) for layer in model._flatten_layers()):
        raise ArgumentError(
            "virtual_steps() with SyncBatchNormalization: the layer sees the batches of ranks, "
            "whose number may change; use keras.layers.BatchNormalization, whose moments "
            "virtual_steps() averages"
        )


def check_machine(threads: int) -> None:
    """Do nothing: TensorFlow keeps the threads with which it began."""


def seed_backend(number: int) -> None:
    """Do nothing: tf.random.set_seed would drop all compiled functions."""


def describe_machine(threads: int) -> dict[str, str]:
    """Return what decides the bits that this machine computes."""
    simd = np.show_config(mode="dicts")["SIMD Extensions"]
    return {
        "processor": f"{platform.machine()}, {' '.join(simd['found'] or simd['baseline'])}",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "hvdlite": hvdlite.__version__,
        "threads": str(threads),
    }
