"""hvdlite for NumPy arrays and numbers, without any framework: `import hvdlite.numpy as hvd`.

For metrics, for scikit-learn, for simulations: wherever several processes compute and have to
agree on something.

Example:
    >>> import numpy as np
    >>> import hvdlite.numpy as hvd
    >>> hvd.init()
    >>> mean = hvd.allreduce(3.0)
    >>> total = hvd.allreduce(np.ones(5), op=hvd.Sum)
    >>> every_row = hvd.allgather(np.ones((hvd.rank() + 1, 2)))
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite import _core, api, basics, ops
from hvdlite.api import *
from hvdlite.errors import ArgumentError
from hvdlite.objects import allgather_object, broadcast_object, join
from hvdlite.ops import next_name, travels_as
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "grouped_allreduce",
    "join",
    "reducescatter",
]
__all__ += api.__all__


def allreduce(
    value: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a number or an array over all ranks.

    Args:
        value: a number, a list of numbers or an array of any shape, the same on all ranks.
        average: the older form of `op`: True for `Average`, False for `Sum`.
        name: identifies the operation on all ranks; a call without a name is numbered.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: multiplies this rank's input.
        postscale_factor: multiplies the result.
        process_set: its members take part; by default all ranks.

    Returns:
        A new array of the same shape and dtype; for a number, a NumPy number.

    Raises:
        ArgumentError: the value or an argument cannot be used.
        MismatchError: the ranks' values differ in shape, dtype or op.

    Example:
        >>> mean_loss = hvd.allreduce(0.25)
        >>> counts = hvd.allreduce(np.array([3, 4]), op=hvd.Sum)
    """
    name = name or next_name("allreduce", member_id(process_set))
    array = copied(value, name)
    op = ops.choose_op(average, op)
    reduce_arrays({name: array}, name, op, prescale_factor, postscale_factor, process_set)
    return _as_given(array, value)


def allreduce_(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a writable `array` over all ranks in place, and return it; otherwise as `allreduce`.

    A contiguous array is reduced where it lies, without a copy.

    Example:
        >>> histogram = np.zeros(10)
        >>> hvd.allreduce_(histogram, op=hvd.Sum)
    """
    name = name or next_name("allreduce", member_id(process_set))
    op = ops.choose_op(average, op)
    with _in_place(array, name) as memory:
        reduce_arrays({name: memory}, name, op, prescale_factor, postscale_factor, process_set)
    return array


def grouped_allreduce(
    values: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several `values` in one operation, which is faster; otherwise as `allreduce`.

    All ranks give as many, in the same order; each may have its own shape and dtype. The result is
    a list.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([0.3, 0.9])
    """
    name = name or next_name("grouped_allreduce", member_id(process_set))
    op = ops.choose_op(average, op)
    arrays = {f"{name}.{i}": copied(value, f"{name}.{i}") for i, value in enumerate(values)}
    reduce_arrays(arrays, name, op, prescale_factor, postscale_factor, process_set)
    return [_as_given(array, value) for array, value in zip(arrays.values(), values, strict=True)]


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' arrays along the first dimension, which may differ between ranks.

    Args:
        value: an array of at least one dimension, of any dtype but Python objects.
        name, process_set: as for `allreduce`.

    Returns:
        A new array with the rows of all ranks, in the order of the ranks.

    Raises:
        ArgumentError: the value cannot be sent.
        MismatchError: the ranks' arrays differ in dtype or in another dimension.

    Example:
        >>> every_prediction = hvd.allgather(np.array([0.5, 0.25]))
    """
    name = name or next_name("allgather", member_id(process_set))
    array = _with_rows("allgather", value, name)
    sent = _moved_as(array)
    handle = basics.engine().allgather(
        name, [_spec(name, sent)], member_id(process_set), keep=sent, blocking=True
    )
    return _received(handle, array)[0]


def alltoall(
    value: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some of an array's rows to each rank, and receive some from each.

    Args:
        value: an array of at least one dimension; the rows for rank 0 come first.
        splits: how many rows go to each rank; they add up to the first dimension. Without
            `splits` every rank gets the same number.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: whose members take part, one split each; by default all ranks.

    Returns:
        A new array, the rows from rank 0 first. With `splits`, a pair: that array, and an array of
        how many rows came from each rank.

    Raises:
        ArgumentError: the value cannot be sent, or some rank's splits are wrong.
        MismatchError: the ranks' arrays differ in dtype or in another dimension.

    Example:
        >>> rows, counts = hvd.alltoall(np.arange(hvd.size()), splits=[1] * hvd.size())
    """
    name = name or next_name("alltoall", member_id(process_set))
    array = _with_rows("alltoall", value, name)
    sent = _moved_as(array)
    numbers = [] if splits is None else [int(one) for one in splits]
    handle = basics.engine().alltoall(
        name, _spec(name, sent), numbers, member_id(process_set), keep=sent, blocking=True
    )
    output, rows = _received(handle, array)
    return output if splits is None else (output, np.array(rows))


def reducescatter(
    value: Any,
    op: int = ops.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks, and keep this rank's share along the first dimension.

    With r rows and n ranks each gets r // n rows, and the first r % n ranks get one more.

    Args:
        value: an array of at least one dimension, of the same shape on all ranks.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        name, process_set: as for `allreduce`.

    Returns:
        A new array with this rank's rows.

    Raises:
        ArgumentError: the value or an argument cannot be used.
        MismatchError: the ranks' values differ in shape, dtype or op.

    Example:
        >>> my_rows = hvd.reducescatter(np.ones((5, 3)), op=hvd.Sum)
    """
    op = ops.choose_op(None, op)
    name = name or next_name("reducescatter", member_id(process_set))
    array = _with_rows("reducescatter", value, name)
    handle = basics.engine().reducescatter(
        name, [_spec(name, array)], op, process_set=member_id(process_set), keep=array,
        blocking=True,
    )  # fmt: skip
    return _received(handle, array)[0]


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return one rank's number or array on all ranks.

    Args:
        value: a number or an array of the same shape and dtype on all ranks.
        root_rank: the rank whose value all receive.
        name, process_set: as for `allreduce`.

    Returns:
        A new array; for a number, a NumPy number.

    Raises:
        ArgumentError: the value cannot be sent, or `root_rank` is not a rank.
        MismatchError: the ranks' values differ in shape or dtype.

    Example:
        >>> seeds = hvd.broadcast(np.random.randint(1000, size=3), root_rank=0)
    """
    check_root(root_rank, process_set)
    name = name or next_name("broadcast", member_id(process_set))
    array = copied(value, name)
    broadcast_arrays({name: array}, root_rank, name, process_set)
    return _as_given(array, value)


def broadcast_(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite a writable `array` with that of one rank, and return it; otherwise as `broadcast`.

    Example:
        >>> weights = np.random.rand(10)
        >>> hvd.broadcast_(weights, root_rank=0)
    """
    check_root(root_rank, process_set)
    name = name or next_name("broadcast", member_id(process_set))
    with _in_place(array, name) as memory:
        broadcast_arrays({name: memory}, root_rank, name, process_set)
    return array


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until every rank, or every member of a process set, has called it.

    Args:
        process_set: its members take part; by default all ranks.
        name: identifies the operation on all ranks; a call without a name is numbered.

    Raises:
        HorovodInternalError: a rank died or left.

    Example:
        >>> hvd.barrier()
    """
    number = member_id(process_set)
    name = name or next_name("barrier", number)
    basics.engine().barrier(name, number, blocking=True).wait()


def mean_of_arrays(arrays: Sequence[Any], name: str, process_set: ProcessSet) -> None:
    """Overwrite contiguous arrays of floats by their means over the members, in one operation."""
    named = {f"{name}.{i}": array for i, array in enumerate(arrays)}
    reduce_arrays(named, name, ops.Average, 1.0, 1.0, process_set)


def broadcast_arrays(
    arrays: dict[str, Any], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    """Overwrite contiguous arrays, by name, with the root's values, in one operation."""
    sent = [_moved_as(array) for array in arrays.values()]
    specs = [_spec(key, one, one) for key, one in zip(arrays, sent, strict=True)]
    if specs:
        number = member_id(process_set)
        engine = basics.engine()
        engine.broadcast(name, specs, root_rank, number, keep=sent, blocking=True).wait()


def reduce_arrays(
    arrays: dict[str, Any],
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    cast: int | None = None,
) -> None:
    """Overwrite contiguous arrays, by name, with what their reduction gives, in one operation."""
    specs = [_spec(key, array, array, cast) for key, array in arrays.items()]
    if specs:
        number, keep = member_id(process_set), list(arrays.values())
        basics.engine().allreduce(
            name, specs, op, prescale, postscale, process_set=number, keep=keep, blocking=True
        ).wait()


def _with_rows(function: str, value: Any, name: str) -> Any:
    """Copy an array of at least one dimension; refuse a single number."""
    array = copied(value, name)
    if array.ndim == 0:
        raise ArgumentError(
            f"{function} '{name}' of a single number; give it a dimension: [number]"
        )
    return array


@contextlib.contextmanager
def _in_place(array: Any, name: str) -> Iterator[Any]:
    """Give the writable array itself where the core can write into it, and a copy otherwise."""
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        what = "a read-only array" if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(
            f"'{name}' is reduced in place; it must be a writable array, not {what}"
        )
    native = array.flags.c_contiguous and array.dtype.isnative and array.flags.aligned
    if native and not array.dtype.hasobject:
        yield array
    else:
        copy = copied(array, name)
        yield copy
        array[...] = copy


def copied(value: Any, name: str) -> Any:
    """Copy a number or an array: contiguous, in native byte order; refuse Python objects."""
    array = np.array(value, order="C")
    if array.dtype.hasobject:
        raise ArgumentError(
            f"'{name}': a {type(value).__name__} of dtype {array.dtype} cannot be sent; send "
            "numbers, or Python objects with allgather_object and broadcast_object"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _as_given(array: Any, value: Any) -> Any:
    """Return the result for `value`: a NumPy number for a number, otherwise the array."""
    return array if array.ndim or isinstance(value, np.ndarray) else array[()]


def _spec(name: str, source: Any, target: Any = None, cast: int | None = None) -> _core.Tensor:
    """Describe an array to the core; without a `target` the engine allocates the result."""
    # `cast` is a 16-bit float of the core, to which an allreduce casts the array on the way.
    number = ops.dtype_number(source.dtype.name, name)
    output = 0 if target is None else target.ctypes.data
    wire = travels_as(cast, source.dtype.name)
    return _core.Tensor(name, number, source.shape, source.ctypes.data, output, wire=wire)


def _moved_as(array: Any) -> Any:
    """Return an array that is only moved: a dtype unknown to the core becomes bytes."""
    if array.dtype.name in _core.DTYPES:
        return array
    if array.dtype.itemsize == 0:
        raise ArgumentError(f"an array of dtype {array.dtype} has no bytes to send")
    # The bytes of one element are a new last dimension, so that rows stay rows.
    return array.reshape(*array.shape, 1).view(np.uint8)


def _received(handle: _core.Handle, array: Any) -> tuple[Any, Sequence[int]]:
    """Wait; return the received rows, of the dtype of `array`, and how many each rank sent."""
    handle.wait()
    rows = handle.first_dimensions
    output = np.frombuffer(handle.take_output(), array.dtype)
    return output.reshape(sum(rows), *array.shape[1:]), rows
