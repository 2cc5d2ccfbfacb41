"""hvdlite for TensorFlow: `import hvdlite.tensorflow as hvd`.

A gradient reaches the engine without Python: it is an asynchronous operation of a library
(`library`, `csrc/tensorflow`), which TensorFlow starts when the gradient is ready, and which ends
when the core's completion calls its continuation. GPU kernels find TensorFlow's stream
(`csrc/tensorflow/ops.cc`), and the core makes that stream wait for a result before it calls
the continuation. The operations are stateless, because TensorFlow would run stateful ones one at a
time; their last input, `call_scalars` (`tracing`), keeps TensorFlow from folding them as constants.
A function that XLA compiles makes one grouped custom call instead (`requests`).
"""

import atexit
import contextlib
import gc
import importlib
from typing import Any

import tensorflow as tf

from hvdlite import _core, api, basics
from hvdlite.api import *
from hvdlite.tensorflow import elastic, functions, ops
from hvdlite.tensorflow.functions import *
from hvdlite.tensorflow.ops import *
from hvdlite.tensorflow.optimizer import DistributedOptimizer
from hvdlite.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += api.__all__
__all__ += functions.__all__
__all__ += ops.__all__


def _take_own_gpu(engine: _core.Engine | None) -> None:
    """Make only the GPU of `local_rank` visible to TensorFlow, which takes memory on all it sees.

    A script has chosen by using TensorFlow before `init`, or by `tf.config.set_visible_devices`. A
    rank that is alone on its host keeps all GPUs. Without a world the engine is None.
    """
    if engine is None or basics.local_size() == 1:
        return
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < 2 or tf.config.get_visible_devices("GPU") != gpus:
        return
    with contextlib.suppress(RuntimeError):  # It is raised if TensorFlow is in use already.
        tf.config.set_visible_devices(gpus[basics.local_rank() % len(gpus)], "GPU")


basics.watch(_take_own_gpu)

# An exception that a script has caught leaves the datasets of that `fit` in reference cycles. To
# destroy one, TensorFlow waits until Python code that loads its next batch has returned, which
# never happens once the interpreter is shutting down: the process would hang.
atexit.register(gc.collect)

# These import Keras, and are looked up at first use: TensorFlow does not need Keras.
_LATER = {
    "PartialDistributedOptimizer": "hvdlite.keras",
    "SyncBatchNormalization": "hvdlite.tensorflow.sync_batch_norm",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
