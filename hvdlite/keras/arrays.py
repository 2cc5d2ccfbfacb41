"""Collectives of NumPy arrays and of Keras variables, without the framework of the backend.

They are for small or rare data: metrics, scores, the variables at the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite import basics, ops
from hvdlite import numpy as of_arrays
from hvdlite.errors import ArgumentError
from hvdlite.numpy import copied
from hvdlite.ops import Compressor, NoneCompressor, cast_in_core, gather_bytes, next_name
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_buffers",
    "broadcast",
    "broadcast_variables",
    "reducescatter",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] | Compressor = NoneCompressor,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a number or an array over all ranks.

    Args:
        value: a number, an array, a tensor or a variable of the same shape on all ranks.
        name: identifies the operation on all ranks; a call without a name is numbered.
        average: the older form of `op`: True for `Average`, False for `Sum`.
        prescale_factor, postscale_factor: multiply this rank's input, and the result.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        compression: how the value is compressed while it travels; see `Compression`.
        process_set: its members take part; by default all ranks.

    Returns:
        A NumPy array.

    Raises:
        ArgumentError: the value or an argument cannot be used.
        MismatchError: the ranks' values differ in shape, dtype or op.

    Example:
        >>> score = hvd.allreduce(model.evaluate(inputs, labels))
    """
    op = ops.choose_op(average, op)
    name = name or next_name("allreduce", member_id(process_set))
    cast, by_hand = cast_in_core(compression, op)
    scales = prescale_factor, postscale_factor

    def reduced(value: Any) -> Any:
        array = _array(value, name)
        of_arrays.reduce_arrays({name: array}, name, op, *scales, process_set, cast)
        return array

    if compression is not NoneCompressor:
        value = keras.ops.convert_to_tensor(value)
    if by_hand is NoneCompressor:
        return reduced(value)
    wire, context = by_hand.compress(value)
    result = by_hand.decompress(keras.ops.convert_to_tensor(reduced(wire)), context)
    return _array(result, name)


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' arrays along the first dimension, which may differ between ranks.

    Args:
        value: an array, a tensor or a variable of at least one dimension.
        name, process_set: as for `allreduce`.

    Returns:
        A NumPy array.

    Raises:
        ArgumentError: the value cannot be sent.
        MismatchError: the ranks' values differ in dtype or in another dimension.

    Example:
        >>> every_prediction = hvd.allgather(model.predict(inputs))
    """
    name = name or next_name("allgather", member_id(process_set))
    return of_arrays.allgather(_array(value, name), name, process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks, and keep this rank's share along the first dimension.

    With r rows and n ranks each gets r // n rows, and the first r % n ranks get one more.

    Args:
        value: an array, a tensor or a variable of at least one dimension, of the same shape on all
            ranks.
        name, process_set: as for `allreduce`.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.

    Returns:
        A NumPy array.

    Raises:
        ArgumentError: the value or an argument cannot be used.
        MismatchError: the ranks' values differ in shape, dtype or op.

    Example:
        >>> my_rows = hvd.reducescatter(np.ones((5, 3)), op=hvd.Sum)
    """
    name = name or next_name("reducescatter", member_id(process_set))
    return of_arrays.reducescatter(_array(value, name), op, name, process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return one rank's array on all ranks.

    Args:
        value: a number, an array, a tensor or a variable of the same shape on all ranks.
        root_rank: the rank whose values all receive.
        name, process_set: as for `allreduce`.

    Returns:
        A NumPy array.

    Raises:
        ArgumentError: the value cannot be sent, or `root_rank` is not a rank.
        MismatchError: the ranks' values differ in shape or dtype.

    Example:
        >>> seeds = hvd.broadcast(np.random.randint(1000, size=3), root_rank=0)
    """
    check_root(root_rank, process_set)
    name = name or next_name("broadcast", member_id(process_set))
    array = _array(value, name)
    of_arrays.broadcast_arrays({name: array}, root_rank, name, process_set)
    return array


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite Keras variables with one rank's values.

    Args:
        variables: the same ones in the same order on all ranks: `model.weights`,
            `optimizer.variables`. (`model.variables` also has the states of random seeds: after it,
            dropout drops the same units on every rank.)
        root_rank: the rank whose values all receive.
        process_set: its members take part; by default all ranks.

    Raises:
        ArgumentError: a variable cannot be sent, or `root_rank` is not a rank.
        MismatchError: the ranks' variables differ; the message names the first difference.

    Example:
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
    """
    check_root(root_rank, process_set)
    targets = list(variables)
    name = next_name("broadcast_variables", member_id(process_set))
    arrays = {}
    for index, variable in enumerate(targets):
        if not hasattr(variable, "assign"):
            raise ArgumentError(f"a {type(variable).__name__} is not a variable")
        key = str(getattr(variable, "path", getattr(variable, "name", "variable")))
        key = key if key not in arrays else f"{key}.{index}"
        arrays[key] = _array(variable, key)
    of_arrays.broadcast_arrays(arrays, root_rank, name, process_set)
    for variable, array in zip(targets, arrays.values(), strict=True):
        variable.assign(array)


def allreduce_buffers(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Replace a model's floating-point weights that are not trained by their averages.

    Each rank's batch normalization computes moving statistics from that rank's batches. Call this
    function on every rank before evaluation and before a checkpoint, so that all ranks evaluate
    the same model. The weights of frozen layers are equal on all ranks and keep their values.

    Args:
        model: a model of Keras 3 or of Keras 2.
        process_set: its members take part; by default all ranks.

    Raises:
        ArgumentError: `model` is not a model.
        MismatchError: the ranks' models differ.

    Example:
        >>> hvd.allreduce_buffers(model)
        >>> model.evaluate(test_data)
    """
    if not hasattr(model, "non_trainable_weights"):
        raise ArgumentError(f"allreduce_buffers takes a model, not a {type(model).__name__}")
    name = next_name("allreduce_buffers", member_id(process_set))
    arrays = []
    buffers = []
    for variable in model.non_trainable_weights:
        array = _array(variable, name)
        if keras.backend.is_float_dtype(array.dtype.name):
            buffers.append(variable)
            arrays.append(array.astype(np.float64))  # Equal floats of fewer bits average exactly.
    if not buffers:
        return
    of_arrays.mean_of_arrays(arrays, name, process_set)
    for variable, array in zip(buffers, arrays, strict=True):
        variable.assign(array.astype(keras.backend.standardize_dtype(variable.dtype)))


def _array(value: Any, name: str) -> Any:
    """Copy a number, an array, a tensor or a variable into a new array."""
    if not isinstance(value, np.ndarray | np.generic | int | float | list | tuple):
        value = keras.ops.convert_to_numpy(value)
    return copied(value, name)


def exchange(value: Any, name: str, process_set: ProcessSet) -> list[Any]:
    """Gather one value of each member, which JSON can represent, in the order of the members."""
    text = json.dumps(value).encode()
    blocks, _ = gather_bytes(basics.engine(), text, name, member_id(process_set))
    return [json.loads(bytes(block)) for block in blocks]


def describe_by_rank(values: Sequence[Any], process_set: ProcessSet) -> str:
    """List the values with their ranks: "12 on rank 0, 11 on ranks 1 and 2"."""
    ranks_of: dict[Any, list[str]] = {}
    for rank, value in zip(process_set.ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on rank {ranks[0]}"
        if len(ranks) == 1
        else f"{value} on ranks {', '.join(ranks[:-1])} and {ranks[-1]}"
        for value, ranks in ranks_of.items()
    )
