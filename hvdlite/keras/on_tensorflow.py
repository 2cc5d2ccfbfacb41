"""What Keras needs of its TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import ArrayDataAdapter, array_data_adapter, array_slicing

from hvdlite.errors import ArgumentError
from hvdlite.tensorflow.library import collective_errors as collective_errors
from hvdlite.tensorflow.ops import Compression as Compression
from hvdlite.tensorflow.ops import allgather as allgather
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
def scale_gradient(gradient: Any, factor: Any) -> Any:
    return tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient)  # or tf.IndexedSlices


def first_of(iterator: Any) -> Any:
    """Return what a batch looks like, without reading one."""
    spec = iterator._distributed_dataset.element_spec
    return keras.tree.map_structure(lambda one: one if hasattr(one, "dtype") else None, spec)


def checksum(array: Any) -> Any:
    """Add the words of an array; their order counts."""
    words = tf.bitcast(tf.cast(array, tf.float32), tf.int32)
    return tf.reduce_sum(tf.cumsum(tf.cast(tf.reshape(words, [-1]), tf.int64)))


def random_state(rank: int = 0) -> int:
    """Return a seed for shuffles; random layers have variables of their own."""
    return int(tf.random.uniform((), maxval=1 << 31, dtype=tf.int64))


def swap_random(state: int) -> int:
    return state


def shuffle_alike(given: dict[str, Any], seed: int) -> None:
    """Give `fit` data that it shuffles in one order on all ranks, if the data are arrays."""
    data = given["x"], given["y"], given["sample_weight"]
    if not given["shuffle"] or not array_data_adapter.can_convert_arrays(data):
        return
    if given["validation_split"] and given["validation_data"] is None:
        split = array_slicing.train_validation_split(data, given["validation_split"])
        data, given["validation_data"] = split
    size, steps, weights = (given[one] for one in ("batch_size", "steps_per_epoch", "class_weight"))
    adapter = ArrayDataAdapter(*data, size, steps, class_weight=weights)
    if given["shuffle"] is True:  # Within a batch ("batch") the order changes nothing.
        vars(adapter)["get_tf_dataset"] = lambda: _shuffled(adapter, seed)
    given.update(x=adapter, y=None, sample_weight=None, class_weight=None, validation_split=0.0)


def _shuffled(adapter: Any, seed: int) -> Any:
    """Make a dataset of the adapter's arrays whose rows have another order in each pass."""
    sliceable = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    arrays = keras.tree.map_structure(tf.convert_to_tensor, keras.tree.lists_to_tuples(sliceable))

    def rows_of_pass(seed: Any) -> Any:
        rows = tf.range(adapter._num_samples, dtype=tf.int64)
        order = tf.random.experimental.stateless_shuffle(rows, [seed, 0])
        return tf.data.Dataset.from_tensor_slices(order).batch(adapter._batch_size)

    def gathered(rows: Any) -> Any:
        return tf.nest.map_structure(lambda one: tf.gather(one, rows), arrays)

    seeds = tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(1)
    batches = seeds.flat_map(rows_of_pass).map(gathered, tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)
