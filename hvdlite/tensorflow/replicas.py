"""`check_replicas`: do all ranks still have the same variables?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.replicas import array_word_sum, check
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


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
