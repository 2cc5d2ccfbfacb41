"""Worlds of Keras, on each backend: loaded by the ranks only, many scenarios in one world.

`keras` and `hvd` import their modules at first use, so that pytest's own process does not. Test
files have TensorFlow in PRELOAD, because `keras.utils.set_random_seed` imports it on each backend.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from parallel.scenarios import Later, Worlds, run_all

BACKENDS = ("tensorflow", "torch")


keras: Any = Later("keras")
hvd: Any = Later("hvdlite.keras")


def environment(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}


def on_backends(*worlds: tuple[int, str]) -> Worlds:
    """Make worlds of so many ranks on that backend."""
    return {f"{n}-{backend}": {"n": n, "env": environment(backend)} for n, backend in worlds}


def on_tensorflow() -> bool:
    return bool(keras.backend.backend() == "tensorflow")


def start() -> None:
    if on_tensorflow():
        import tensorflow as tf

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


def dense_model(dtype: str = "float32", built: bool = True) -> Any:
    """Make a model of four variables, with the same weights on every rank."""
    keras.utils.set_random_seed(11)
    layers = [keras.layers.Dense(4, "tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    if built:
        layers.insert(0, keras.Input((5,), dtype=dtype.replace("mixed_float16", "float32")))
    return keras.Sequential(layers)


def weights_of(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]


def on_every_rank(values: Any) -> list[Any]:
    return hvd.allgather_object(values)  # type: ignore[no-any-return]


def same_bits(arrays: list[Any]) -> bool:
    """Return whether the ranks' arrays are the same to the bit."""
    everyone = on_every_rank([array.tobytes() for array in arrays])
    return all(one == everyone[0] for one in everyone)
