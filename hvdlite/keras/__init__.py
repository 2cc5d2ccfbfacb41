"""hvdlite for Keras 3, on its TensorFlow and PyTorch backends: `import hvdlite.keras as hvd`.

The optimizer and the callbacks also work with models of Keras 2, the package `tf_keras`.

This package depends on no framework but Keras. `DistributedOptimizer` overrides `apply`, and passes
the gradients to one function, `allreduce_gradients`, of the module for Keras's backend
(`on_tensorflow`, `on_torch`). Weights and metrics travel as NumPy arrays (`arrays`). `keras2` has
what is different for objects of `tf_keras`; `backend` imports it when the first of them turns up.
"""

from typing import Any

from hvdlite import api
from hvdlite.api import *
from hvdlite.keras import arrays, callbacks, elastic
from hvdlite.keras import parameter_server as parameter_server
from hvdlite.keras.arrays import *
from hvdlite.keras.backend import backend_adapter, import_adapter
from hvdlite.keras.distributed_model import distribute
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from hvdlite.objects import allgather_object, broadcast_object, join

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather_object",
    "broadcast_object",
    "callbacks",
    "distribute",
    "elastic",
    "join",
    "load_model",
]
__all__ += api.__all__
__all__ += arrays.__all__

import_adapter()


def __getattr__(name: str) -> Any:
    if name == "Compression":
        return backend_adapter().Compression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
