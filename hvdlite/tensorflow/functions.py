"""Broadcasting initial state: the variables of one rank, to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.tensorflow.collectives import requests
from hvdlite.tensorflow.graph.names import WireName, wire_name
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


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
    """Overwrite variables with one rank's values, and return the variables.

    Args:
        variables: as for `broadcast_variables`.
        root_rank: the rank whose values all receive.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: its members take part; by default all ranks.

    Returns:
        The variables.

    Raises:
        ArgumentError: as for `broadcast_variables`.
        tf.errors.FailedPreconditionError: as for `broadcast_variables`.

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
    tensors = []
    for variable, name in zip(targets, names, strict=True):
        if not hasattr(variable, "assign"):
            raise ArgumentError(f"'{name}' is a {type(variable).__name__}, not a variable")
        tensors.append(requests.check(variable, name))
    received = requests.broadcast(tensors, wire, names, root_rank) if tensors else []
    for variable, tensor in zip(targets, received, strict=True):
        variable.assign(tensor)
