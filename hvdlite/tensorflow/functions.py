"""Starting level: the variables of one rank, on all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.tensorflow import requests
from hvdlite.tensorflow.names import wire_name
from hvdlite.tensorflow.tracing import traced_as_it_is

# Types that the core does not know travel as their bits.
_AS_BITS = {tf.uint16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}


@traced_as_it_is
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite variables with one rank's values, eagerly or in a function.

    Args:
        variables: of TensorFlow or of Keras, the same ones in the same order on all ranks:
            `model.weights`, `optimizer.variables`. (`model.variables` also has the states of
            Keras's random seeds: after it, dropout drops the same units on every rank.)
        root_rank: the rank whose values all receive.
        process_set: whose members take part; all ranks without.

    Raises:
        ArgumentError: a variable cannot be sent, or `root_rank` is no rank.
        tf.errors.AbortedError: the ranks' variables differ in shape or dtype, or in number.

    Example:
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
        >>> hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    check_root(root_rank, process_set)
    targets = list(variables)
    wire = wire_name("broadcast_variables", None, process_set)
    names = [
        str(getattr(variable, "path", getattr(variable, "name", f"{wire.text}.{index}")))
        for index, variable in enumerate(targets)
    ]
    tensors = []
    for variable, name in zip(targets, names, strict=True):
        if not hasattr(variable, "assign"):
            raise ArgumentError(f"'{name}' is a {type(variable).__name__}, not a variable")
        tensor = tf.convert_to_tensor(variable)
        bits = _AS_BITS.get(tensor.dtype)
        tensors.append(requests.check(tensor if bits is None else tf.bitcast(tensor, bits), name))
    received = requests.broadcast(tensors, wire, names, root_rank) if tensors else []
    for variable, tensor in zip(targets, received, strict=True):
        dtype = tf.as_dtype(variable.dtype)
        variable.assign(tf.bitcast(tensor, dtype) if dtype in _AS_BITS else tensor)


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Refuse: TensorFlow 2 keeps no list of global variables.

    Raises:
        ArgumentError: always; it says what to call.
    """
    raise ArgumentError(
        "TensorFlow 2 has no global variables; use hvd.broadcast_variables(model.weights, "
        f"root_rank={root_rank}) and hvd.broadcast_variables(optimizer.variables, ...)"
    )
