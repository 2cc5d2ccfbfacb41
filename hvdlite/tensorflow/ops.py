"""The collectives on TensorFlow tensors.

They work eagerly and in `tf.function`, and are differentiable. `name` identifies the operation on
all ranks. Eager calls without a name are numbered, so every rank must make them in the same order;
in a function, calls are counted while it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import basics, objects
from hvdlite import ops as neutral
from hvdlite.errors import ArgumentError
from hvdlite.ops import CastCompressor, NoneCompressor
from hvdlite.optimizers import check_weight
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.tensorflow import requests
from hvdlite.tensorflow.sparse import allreduce_slices
from hvdlite.tensorflow.tracing import Reduction, WireName, traced_as_it_is, wire_name

__all__ = [
    "Compression",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "cross_rank_op",
    "cross_size_op",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


class _Cast(CastCompressor):
    wide = (tf.float32, tf.float64)

    @staticmethod
    def cast(tensor: tf.Tensor, dtype: Any) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Cast):
    wire = "float16"


class BF16Compressor(_Cast):
    wire = "bfloat16"


class Compression:
    """The compressors that come with hvdlite: give one as `compression=`.

    Attributes:
        none: sends tensors as they are.
        fp16: sends float32 and float64 as float16; values beyond 65504 overflow.
        bf16: sends them as bfloat16: the range of float32 with two to three decimal digits.

    Example:
        >>> wire, ctx = Compression.fp16.compress(tf.ones(2))
        >>> wire.dtype, Compression.fp16.decompress(wire, ctx).dtype
        (tf.float16, tf.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


@traced_as_it_is
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    *,
    sparse_as_dense: bool = False,
    weight: Any = None,
) -> Any:
    """Reduce a tensor over all ranks.

    Args:
        tensor: any shape, the same on all ranks; bool with Min, Max or Product. Averages of
            integers are rounded towards zero. tf.IndexedSlices may have any number of rows: those
            of all ranks are gathered, and averages of integer rows are floats.
        average: the older form of `op`: True for `Average`, False for `Sum`.
        device_dense, device_sparse: accepted for scripts written for Horovod; without effect.
        compression: how the tensor is compressed while it travels, see `Compression`.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: multiplies this rank's input.
        postscale_factor: multiplies the result.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: its members take part; by default all ranks.
        ignore_name_scope: accepted for scripts of Horovod; a name is always taken as it is.
        sparse_as_dense: makes tf.IndexedSlices a dense tensor first.
        weight: makes the result sum(weight * tensor) / sum(weight). It is this rank's number of
            samples or tokens, for example: a number or a scalar tensor. All ranks give one, or
            none does. A weighted average has no gradient.

    Returns:
        The result, with the same bits on every rank; tf.IndexedSlices for tf.IndexedSlices.

    Raises:
        ArgumentError: the tensor or an argument cannot be used; the message says what to do.
        UnsupportedError: tf.IndexedSlices with another operation than `Average` and `Sum`.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in shape, dtype or op, when the
            operation runs; eagerly it is a MismatchError, too.
        tf.errors.AbortedError: the world is over when the operation runs, for example because a
            rank died; eagerly it is a HorovodInternalError, too.

    Example:
        >>> mean_loss = hvd.allreduce(loss, name="loss", weight=len(batch))
    """
    op = neutral.choose_op(average, op)
    check_weight(weight, op)
    reduction = Reduction(op, prescale_factor, postscale_factor, weight)
    wire = wire_name("allreduce", name, process_set)
    if isinstance(tensor, tf.IndexedSlices) and sparse_as_dense:
        tensor = tf.convert_to_tensor(tensor)
    return _allreduce([tensor], wire, reduction, compression)[0]


@traced_as_it_is
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    weight: Any = None,
) -> list[Any]:
    """Reduce several tensors; dense ones of one dtype complete together. Otherwise as `allreduce`.

    tf.IndexedSlices among them are gathered, each alone, and returned as tf.IndexedSlices.

    All ranks give as many `tensors`, each with the same shape and dtype on all ranks.

    Returns:
        The new tensors, in the same order.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy], name="metrics")
    """
    op = neutral.choose_op(average, op)
    check_weight(weight, op)
    reduction = Reduction(op, prescale_factor, postscale_factor, weight)
    wire = wire_name("grouped_allreduce", name, process_set).grouped(len(tensors))
    return _allreduce(tensors, wire, reduction, compression)


def _allreduce(
    tensors: Sequence[Any], wire: WireName, reduction: Reduction, compression: Any
) -> list[Any]:
    """Reduce tensors together, and each of tf.IndexedSlices alone."""
    results = list(tensors)
    dense = []
    for i, (tensor, name) in enumerate(zip(tensors, wire.names, strict=True)):
        if isinstance(tensor, tf.IndexedSlices):
            own = wire._replace(text=name, tensors=None)
            results[i] = allreduce_slices(tensor, own, reduction, compression)
        else:
            dense.append(i)
    wire = wire._replace(tensors=[wire.names[i] for i in dense])
    reduced = requests.allreduce([tensors[i] for i in dense], wire, reduction, compression)
    for i, tensor in zip(dense, reduced, strict=True):
        results[i] = tensor
    return results


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
        name, ignore_name_scope, process_set: as for `allreduce`.

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
    return requests.allgather([tensor], wire)[0]


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
    wire = wire_name("grouped_allgather", name, process_set).grouped(len(tensors))
    return requests.allgather(tensors, wire)


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
        name, process_set, ignore_name_scope: as for `allreduce`.
        prescale_factor, postscale_factor: multiply this rank's input, and the result.

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
    return requests.reducescatter([tensor], wire, reduction, compression)[0]


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
    wire = wire_name("grouped_reducescatter", name, process_set).grouped(len(tensors))
    reduction = Reduction(neutral.choose_op(None, op), prescale_factor, postscale_factor)
    return requests.reducescatter(tensors, wire, reduction, compression)


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
        name, ignore_name_scope, process_set: as for `allreduce`.

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
    if splits is None:
        return requests.alltoall(tensor, tf.zeros([0], tf.int64), wire)[0]
    numbers = tf.convert_to_tensor(splits)
    if not numbers.dtype.is_integer:
        raise ArgumentError(
            f"alltoall '{wire.text}': splits of dtype {numbers.dtype.name}; give one whole number "
            "of rows for each rank"
        )
    output, received = requests.alltoall(tensor, tf.cast(numbers, tf.int64), wire)
    return output, tf.cast(received, numbers.dtype)


@traced_as_it_is
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Copy one rank's tensor to all ranks.

    Args:
        tensor: of the same shape and dtype on all ranks; only the root's values matter.
        root_rank: the rank whose values all receive.
        name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
        A tensor with the root's values.

    Raises:
        ArgumentError: the tensor cannot be used, or `root_rank` is not a rank.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in shape or dtype, or they name
            different roots.
        tf.errors.AbortedError: the world is over.

    Example:
        >>> shared = hvd.broadcast(tf.random.normal([3]), root_rank=0)
    """
    check_root(root_rank, process_set)
    wire = wire_name("broadcast", name, process_set)
    return requests.broadcast([tensor], wire, root_rank)[0]


@traced_as_it_is
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until every rank, or every member of a process set, has called it.

    In a function, the barrier waits for everything that was traced before it, and the function does
    not return before the barrier; operations traced after it do not wait for it.

    Args:
        process_set: its members wait for each other; by default all ranks.
        name: identifies the operation on all ranks; a call without a name is numbered.

    Raises:
        HorovodInternalError: the world is over, for example because a rank died.

    Example:
        >>> hvd.barrier()
    """
    wire = wire_name("barrier", name, process_set)
    if tf.executing_eagerly():
        text = wire.text if wire.number < 0 else f"{wire.text}.{wire.number}"
        basics.engine().barrier(text, wire.process_set, blocking=True).wait()
        return
    before = tf.compat.v1.get_default_graph().get_operations()
    with tf.control_dependencies(before):
        token = tf.identity(tf.constant(1, tf.int32))
    met = requests.allreduce([token], wire, Reduction(neutral.Sum))
    # It is stateful, so a function runs it, and takes a value, for which the ranks must have met:
    # an operation that is only waited for may be pruned.
    tf.raw_ops.Assert(condition=met[0] > 0, data=met)


def join(device: int = -1) -> int:
    """Wait until all ranks have joined, while the others train; see `hvdlite.objects.join`.

    Args:
        device: accepted for scripts written for Horovod; without effect.

    Returns:
        The rank that joined last.

    Raises:
        ArgumentError: the call is in a function, which would run it once, while it is traced.

    Example:
        >>> last = hvd.join()
    """
    if not tf.executing_eagerly():
        raise ArgumentError("join() waits for the ends of loops: call it outside of tf.function")
    return objects.join(device)


@traced_as_it_is
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank when the operation runs, for functions kept across worlds.

    Args:
        name: the name of the operation in a graph.
    """
    return requests.query("rank", name=name)


@traced_as_it_is
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the size of a process set when the operation runs.

    Args:
        process_set_id: the number of the process set; 0 is that of all ranks.
        name: the name of the operation in a graph.
    """
    return requests.query("size", process_set_id, name)


@traced_as_it_is
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is a member of a process set, else 0; arguments as for `size_op`."""
    return requests.query("included", process_set_id, name)


@traced_as_it_is
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's local rank; arguments as for `rank_op`."""
    return requests.query("local_rank", name=name)


@traced_as_it_is
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host; arguments as for `rank_op`."""
    return requests.query("local_size", name=name)


@traced_as_it_is
def cross_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this host's number among hosts with this `local_rank`; arguments as for `rank_op`."""
    return requests.query("cross_rank", name=name)


@traced_as_it_is
def cross_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of hosts with this `local_rank`; arguments as for `rank_op`."""
    return requests.query("cross_size", name=name)
