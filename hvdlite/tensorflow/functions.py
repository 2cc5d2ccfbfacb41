"""The same variables and objects on all ranks: broadcasts, and `check_replicas`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import objects
from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.replicas import array_word_sum, check
from hvdlite.tensorflow import requests
from hvdlite.tensorflow.tracing import WireName, traced_as_it_is, wire_name

__all__ = [
    "allgather_object",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_replicas",
]


@traced_as_it_is
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrite variables with one rank's values, eagerly or in a function.

    Args:
        variables: of TensorFlow or of Keras, the same ones in the same order on all ranks:
            `model.weights`, `optimizer.variables`. (`model.variables` also has the states of
            Keras's random seeds: after it, dropout drops the same units on every rank.)
        root_rank: the rank whose values all receive.
        process_set: its members take part; by default all ranks.
        inplace: accepted for scripts written for Horovod; without effect.

    Raises:
        ArgumentError: a variable cannot be sent, or `root_rank` is not a rank.
        tf.errors.FailedPreconditionError: the ranks' variables differ in shape or dtype, or in
            number.

    Example:
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
        >>> hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    check_root(root_rank, process_set)
    _overwrite(list(variables), root_rank, wire_name("broadcast_variables", None, process_set))


@traced_as_it_is
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables and return them. Otherwise as `broadcast_variables`.

    Args:
        name: identifies the operation on all ranks; a call without a name is numbered.

    Returns:
        The variables.

    Example:
        >>> hvd.broadcast_([variable], root_rank=0)
    """
    check_root(root_rank, process_set)
    targets = list(variables)
    _overwrite(targets, root_rank, wire_name("broadcast_", name, process_set))
    return targets


def _overwrite(targets: Sequence[Any], root_rank: int, wire: WireName) -> None:
    """Receive the root's values and assign them."""
    names = [
        str(getattr(variable, "path", getattr(variable, "name", f"{wire.text}.{index}")))
        for index, variable in enumerate(targets)
    ]
    for variable, name in zip(targets, names, strict=True):
        if not hasattr(variable, "assign"):
            raise ArgumentError(f"'{name}' is a {type(variable).__name__}, not a variable")
    wire = wire._replace(tensors=names)
    received = requests.broadcast(targets, wire, root_rank) if targets else []
    for variable, tensor in zip(targets, received, strict=True):
        variable.assign(tensor)


@traced_as_it_is
def check_replicas(variables: Iterable[Any], process_set: ProcessSet = global_process_set) -> None:
    """Raise an error on every rank unless all ranks have the same bits of these variables.

    Each rank sums the words of each variable, on the host, and sends 8 bytes for each variable. All
    members of the process set call this function between two steps, outside of functions.

    Args:
        variables: `model.trainable_variables`, without layers that each rank has of its own.
        process_set: its members compare; by default all ranks.

    Raises:
        DivergenceError: they differ; `tensors` has their names, `ranks` the ranks of the minority.
        MismatchError: the ranks give other variables.
        ArgumentError: it is called in a function.

    Example:
        >>> if step % 100 == 0:
        ...     hvd.check_replicas(model.trainable_variables)
    """
    if not tf.executing_eagerly():
        raise ArgumentError(
            "check_replicas() reads the values of variables: call it between two steps, outside of "
            "tf.function"
        )
    listed = list(variables)
    names = [str(getattr(one, "path", one.name)) for one in listed]
    numbers = [array_word_sum(np.ascontiguousarray(one.numpy())) for one in listed]
    check(names, numbers, process_set)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send any picklable object of one rank to all ranks; see `hvdlite.objects.broadcast_object`.

    `obj`, `root_rank`, `name` and `process_set` are as there; `session` has no effect.

    Returns:
        A copy of the root's object; on the root, the object itself.

    Example:
        >>> hvd.broadcast_object({"seed": 7}, root_rank=0)["seed"]
        7
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` as a function of the object alone.

    Arguments as for `broadcast_object`.

    Example:
        >>> from_first = hvd.broadcast_object_fn(root_rank=0)
        >>> from_first("hello")
        'hello'
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Collect an object of every rank on all ranks; see `hvdlite.objects.allgather_object`.

    `obj`, `name` and `process_set` are as there; `session` has no effect.

    Returns:
        The objects, in rank order.

    Example:
        >>> hvd.allgather_object(hvd.rank())
        [0]
    """
    return objects.allgather_object(obj, name, process_set)
