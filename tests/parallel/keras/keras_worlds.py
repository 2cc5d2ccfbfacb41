"""Worlds of Keras 3, on each backend, and of Keras 2: loaded by the ranks only.

`keras` and `hvd` import their modules at first use, so that pytest's own process does not. Test
files have TensorFlow in PRELOAD, because `keras.utils.set_random_seed` imports it on each backend.
In the worlds of KERAS_2 `keras` is Keras 2, the package tf_keras.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from parallel.scenarios import Later, Worlds, run_all

BACKENDS = ("tensorflow", "torch")
KERAS_2 = "tf_keras"

tf: Any = Later("tensorflow")
k2: Any = Later("tf_keras")
keras: Any = Later("tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") else "keras")
hvd: Any = Later("hvdlite.keras")


def environment(backend: str) -> dict[str, str]:
    older = {"TF_USE_LEGACY_KERAS": "1"} if backend == KERAS_2 else {}
    on = "tensorflow" if backend == KERAS_2 else backend
    return {"KERAS_BACKEND": on, "TF_CPP_MIN_LOG_LEVEL": "2", **older}


def world(n: int, backend: str) -> dict[str, Any]:
    """Describe a world of so many ranks on a backend of Keras 3, or with Keras 2."""
    how = {"preload": (KERAS_2,)} if backend == KERAS_2 else {}
    return {"n": n, "env": environment(backend), **how}


def on_backends(*worlds: tuple[int, str]) -> Worlds:
    """Make several such worlds."""
    return {f"{n}-{backend}": world(n, backend) for n, backend in worlds}


def on_tensorflow() -> bool:
    return bool(keras.backend.backend() == "tensorflow")


def on_keras_2() -> bool:
    return "TF_USE_LEGACY_KERAS" in os.environ


def start() -> None:
    if on_tensorflow():
        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


def run_scenarios(namespace: dict[str, Any]) -> dict[str, str]:
    """Run the scenarios on this rank, each from the same seed."""

    def seeded() -> None:
        # a warning of Keras with the current PyTorch
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(keras|torch)\b")
        keras.utils.set_random_seed(7)

    return run_all(namespace, start, before_each=seeded)


def data(samples: int = 24, width: int = 5, dtype: str = "float32") -> tuple[Any, Any]:
    """Make the samples of all ranks, the same on each."""
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(samples, width)).astype(dtype)
    return inputs, (inputs.sum(axis=1, keepdims=True) + 0.5).astype(dtype)


def mine(whole: Any) -> Any:
    """Pick this rank's samples; the batches of all ranks together are those of one process."""
    return whole[hvd.rank() :: hvd.size()]


def dense_model(dtype: str = "float32", built: bool = True, package: Any = keras) -> Any:
    """Make a model of four variables, with the same weights on every rank."""
    package.utils.set_random_seed(11)
    layers = [package.layers.Dense(4, "tanh", dtype=dtype), package.layers.Dense(1, dtype=dtype)]
    if built:
        layers.insert(0, package.Input((5,), dtype=dtype.replace("mixed_float16", "float32")))
    return package.Sequential(layers)


@contextmanager
def mixed_precision() -> Iterator[None]:
    """Make `compile` add a LossScaleOptimizer."""
    set_policy = keras.mixed_precision.set_global_policy
    set_policy("mixed_float16")
    try:
        yield
    finally:
        set_policy("float32")


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


def legacy_sgd() -> Any:
    return keras.optimizers.legacy.SGD(0.05, momentum=0.9)


def legacy_adam() -> Any:
    return keras.optimizers.legacy.Adam(0.01, clipvalue=0.1)


def and_legacy(make: Any) -> list[Any]:
    """Add the factory of the older family of optimizers, in Keras 2."""
    return [make, {sgd: legacy_sgd, adam: legacy_adam}[make]] if on_keras_2() else [make]


def variable_of(array: Any, dtype: str = "float32") -> Any:
    return tf.Variable(array, dtype=dtype) if on_keras_2() else keras.Variable(array, dtype=dtype)


def tensor_of(array: Any, dtype: str = "float32") -> Any:
    convert = tf.convert_to_tensor if on_keras_2() else keras.ops.convert_to_tensor
    return convert(array, dtype=dtype)


def array_of(tensor: Any) -> Any:
    return tensor.numpy() if on_keras_2() else keras.ops.convert_to_numpy(tensor)


def weights_of(model: Any) -> list[Any]:
    return [array_of(weight) for weight in model.weights]


def close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(np.allclose(a, b, atol=tolerance) for a, b in pairs)


def on_every_rank(values: Any) -> list[Any]:
    return hvd.allgather_object(values)  # type: ignore[no-any-return]


def same_bits(arrays: list[Any]) -> bool:
    """Return whether the ranks' arrays are the same to the bit."""
    everyone = on_every_rank([array.tobytes() for array in arrays])
    return all(one == everyone[0] for one in everyone)
