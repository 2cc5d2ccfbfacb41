"""hvdlite for Keras 3, on its TensorFlow and PyTorch backends: `import hvdlite.keras as hvd`.

The optimizer and the callbacks also work with models of Keras 2, the package `tf_keras`.

This package depends on no framework but Keras. The optimizer overrides `apply`, and passes the
gradients to one function of the backend's adapter, `allreduce_gradients` (`_tensorflow`, `_torch`).
Weights and metrics travel as NumPy arrays (`collectives`). `_keras2` contains what is different for
objects of `tf_keras`; `adapters` imports it when the first such object turns up.

Example:
    >>> import keras
    >>> import hvdlite.keras as hvd
    >>> hvd.init()
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    >>> model.compile(optimizer=optimizer, loss="mse")
"""

from typing import Any

from hvdlite import api
from hvdlite.api import *
from hvdlite.join import join
from hvdlite.keras import callbacks, elastic
from hvdlite.keras import parameter_server as parameter_server
from hvdlite.keras.adapters import backend_adapter, import_adapter
from hvdlite.keras.collectives import (
    allgather,
    allreduce,
    allreduce_buffers,
    broadcast,
    broadcast_variables,
    reducescatter,
)
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdlite.keras.saving import load_model
from hvdlite.objects import allgather_object, broadcast_object

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_buffers",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += api.__all__

import_adapter()


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Raise an error: Keras 3 keeps no list of global variables.

    Args:
        root_rank: the rank whose values all would receive.

    Raises:
        ArgumentError: always; the message says what to use.

    Example:
        >>> try:
        ...     hvd.broadcast_global_variables(0)
        ... except hvd.ArgumentError as error:
        ...     print(error)  # names the callback that does it
    """
    raise ArgumentError(
        "Keras 3 has no global variables; use hvd.callbacks.BroadcastGlobalVariablesCallback"
        f"({root_rank}) in fit(), or hvd.broadcast_variables(model.weights, root_rank={root_rank}) "
        "and hvd.broadcast_variables(optimizer.variables, ...)"
    )


def __getattr__(name: str) -> Any:
    """Look up `Compression` in the adapter of Keras's backend, at first use."""
    if name == "Compression":
        return backend_adapter().Compression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
