"""Broadcasting initial state: the variables of one rank, to all ranks.

In a graph of TensorFlow 1 the functions return the operation that broadcasts, for a session to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.tensorflow.collectives import requests
from hvdlite.tensorflow.graph.names import WireName, in_session_graph, wire_name
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


@traced_as_it_is
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables with one rank's values, eagerly or in a function.

    Args:
        variables: of TensorFlow or of Keras, the same ones in the same order on all ranks:
            `model.weights`, `optimizer.variables`. (`model.variables` also has the states of
            Keras's random seeds: after it, dropout drops the same units on every rank.)
        root_rank: the rank whose values all receive.
        process_set: its members take part; by default all ranks.
        inplace: accepted for scripts written for Horovod; without effect.

    Returns:
        In a graph of TensorFlow 1 the operation to run; None otherwise.

    Raises:
        ArgumentError: a variable cannot be sent, or `root_rank` is not a rank.
        tf.errors.FailedPreconditionError: the ranks' variables differ in shape or dtype, or in
            number.

    Example:
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
        >>> hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    check_root(root_rank, process_set)
    assigned = _overwrite(
        list(variables), root_rank, wire_name("broadcast_variables", None, process_set)
    )
    return tf.group(*assigned) if in_session_graph() else None


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
        The variables; in a graph of TensorFlow 1 their new values.

    Raises:
        ArgumentError: as for `broadcast_variables`.
        tf.errors.FailedPreconditionError: as for `broadcast_variables`.

    Example:
        >>> hvd.broadcast_([variable], root_rank=0)
    """
    check_root(root_rank, process_set)
    targets = list(variables)
    assigned = _overwrite(targets, root_rank, wire_name("broadcast_", name, process_set))
    if not in_session_graph():
        return targets
    with tf.control_dependencies(assigned):
        return [variable.read_value() for variable in targets]


def _overwrite(targets: Sequence[Any], root_rank: int, wire: WireName) -> list[Any]:
    """Receive the root's values and assign them; return the assignments."""
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
    options = {"read_value": False} if in_session_graph() else {}
    assigned = []
    for variable, tensor in zip(targets, received, strict=True):
        assigned.append(variable.assign(tensor, **options))
    return assigned


def broadcast_global_variables(root_rank: int = 0) -> tf.Operation:
    """Make an operation that broadcasts all global variables of a graph of TensorFlow 1.

    Args:
        root_rank: the rank whose values all receive.

    Returns:
        The operation: run it with `session.run` on every rank, once the variables are initialised.

    Raises:
        ArgumentError: TensorFlow 2 runs eagerly or in functions, and keeps no list of variables;
            the message says what to call.

    Example:
        >>> with tf.Graph().as_default():
        ...     bias = tf.compat.v1.get_variable("bias", [3])
        ...     start = hvd.broadcast_global_variables(0)
    """
    if not in_session_graph():
        raise ArgumentError(
            "TensorFlow 2 has no global variables; use hvd.broadcast_variables(model.weights, "
            f"root_rank={root_rank}) and hvd.broadcast_variables(optimizer.variables, ...)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Makes the sessions of all ranks begin with one rank's variables (TensorFlow 1).

    Example:
        >>> hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        >>> with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        ...     session.run(train)
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        """Choose the rank.

        Args:
            root_rank: the rank whose values all receive.
            device: accepted for scripts written for Horovod; without effect.
        """
        self.root_rank = root_rank
        self._broadcast: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph, which is otherwise complete."""
        self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast: the variables are initialised, or restored from a checkpoint."""
        session.run(self._broadcast)
