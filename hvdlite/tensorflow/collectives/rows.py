"""The collectives on TensorFlow tensors that work on rows, slices along the first dimension.

Like those of `ops`, they work eagerly and in `tf.function`, and are differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import ops as neutral
from hvdlite.errors import ArgumentError
from hvdlite.ops import send_compressed
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.collectives import row_requests as requests
from hvdlite.tensorflow.collectives.requests import Reduction, check
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.graph.names import WireName, wire_name
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


@traced_as_it_is
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in the order of ranks.

    Args:
        tensor: at least one dimension; the first may differ between ranks, and may be 0; the others
            must be the same.
        name: identifies the operation on all ranks; a call without a name is numbered.
        ignore_name_scope: accepted for scripts of Horovod; a name is always taken as it is.
        process_set: its members take part; by default all ranks.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ArgumentError: the tensor cannot be used; the message says what to do.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in dtype or in another
            dimension.
        tf.errors.AbortedError: the world is over.

    Example:
        >>> every_prediction = hvd.allgather(predictions)
    """
    wire = wire_name("allgather", name, process_set)
    return requests.allgather([check(tensor, wire.text)], wire, [wire.text])[0]


@traced_as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors; those of one dtype complete together. Otherwise as `allgather`.

    All ranks give as many `tensors`.

    Returns:
        The new tensors, in the same order.

    Example:
        >>> predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    wire = wire_name("grouped_allgather", name, process_set)
    names = _names(wire, len(tensors))
    checked = [check(one, name) for one, name in zip(tensors, names, strict=True)]
    return requests.allgather(checked, wire, names)


def _names(wire: WireName, count: int) -> list[str]:
    return [f"{wire.text}.{index}" for index in range(count)]


@traced_as_it_is
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = neutral.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks, and keep this rank's share of the rows.

    With r rows and n ranks each gets r // n rows, and the first r % n ranks get one more. The
    shares in rank order are the result of `allreduce`, bit for bit.

    Args:
        tensor: at least one dimension, the same shape on all ranks; bool with Min, Max or Product.
        device_dense: accepted for scripts written for Horovod; without effect.
        compression: how the tensor is compressed while it travels, see `Compression`.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: its members take part; by default all ranks.
        ignore_name_scope: accepted for scripts of Horovod; a name is always taken as it is.
        prescale_factor: multiplies this rank's input.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor: this rank's rows.

    Raises:
        ArgumentError: the tensor or an argument cannot be used; the message says what to do.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in shape, dtype or op, when the
            operation runs.
        tf.errors.AbortedError: the world is over when the operation runs.

    Example:
        >>> my_rows = hvd.reducescatter(tf.ones([5, 3]), op=hvd.Sum)
    """
    wire = wire_name("reducescatter", name, process_set)
    reduction = Reduction(neutral.choose_op(None, op), prescale_factor, postscale_factor)
    return _reducescatter([tensor], wire, [wire.text], reduction, compression)[0]


@traced_as_it_is
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = neutral.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Reduce-scatter several tensors; those of one dtype complete together.

    Otherwise as `reducescatter`.

    All ranks give as many `tensors`, each with the same shape and dtype on all ranks.

    Returns:
        This rank's rows of each tensor, in the same order.

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([tf.ones([5, 3]), tf.ones([5])])
    """
    wire = wire_name("grouped_reducescatter", name, process_set)
    reduction = Reduction(neutral.choose_op(None, op), prescale_factor, postscale_factor)
    return _reducescatter(tensors, wire, _names(wire, len(tensors)), reduction, compression)


def _reducescatter(
    tensors: Sequence[Any],
    wire: WireName,
    names: Sequence[str],
    reduction: Reduction,
    compression: Any,
) -> list[tf.Tensor]:
    checked = [check(one, name, reduction.op) for one, name in zip(tensors, names, strict=True)]
    return send_compressed(
        lambda sent: requests.reducescatter(sent, wire, names, reduction), checked, compression
    )


@traced_as_it_is
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some of a tensor's rows to each rank, and receive some from each.

    Args:
        tensor: at least one dimension; the first may differ between ranks, the others must be the
            same. The rows for rank 0 come first, then those for rank 1, and so on.
        splits: the number of rows for each rank, zero or more; they add up to the first dimension.
            Without `splits` every rank gets the same number.
        name: identifies the operation on all ranks; a call without a name is numbered.
        ignore_name_scope: accepted for scripts of Horovod; a name is always taken as it is.
        process_set: its members take part; by default all ranks.

    Returns:
        A new tensor, the rows from rank 0 first. With `splits`, a pair: that tensor, and the number
        of rows from each rank, of the dtype of `splits`.

    Raises:
        ArgumentError: the tensor cannot be used; the message says what to do.
        tf.errors.InvalidArgumentError: some rank's splits are wrong; every rank gets the error when
            the operation runs, and the message names that rank.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in dtype or in another
            dimension.
        tf.errors.AbortedError: the world is over.

    Example:
        >>> splits = [2] * hvd.size()
        >>> rows, received = hvd.alltoall(tf.ones([2 * hvd.size(), 3]), splits)
    """
    wire = wire_name("alltoall", name, process_set)
    checked = check(tensor, wire.text)
    if splits is None:
        return requests.alltoall(checked, tf.zeros([0], tf.int64), wire)[0]
    numbers = tf.convert_to_tensor(splits)
    if not numbers.dtype.is_integer:
        raise ArgumentError(
            f"alltoall '{wire.text}': splits of dtype {numbers.dtype.name}; give one whole number "
            "of rows for each rank"
        )
    output, received = requests.alltoall(checked, tf.cast(numbers, tf.int64), wire)
    return output, tf.cast(received, numbers.dtype)
