"""Worlds of Keras, on each backend: loaded by the ranks only, many scenarios in one world.

`keras` and `hvd` import what they stand for at first use: pytest's own process does without.
"""

from __future__ import annotations

import importlib
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite import basics
from parallel.scenarios import names_in

BACKENDS = ("tensorflow", "torch")
TIMEOUT = 100.0


class Later:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


keras: Any = Later("keras")
hvd: Any = Later("hvdlite.keras")


def environment(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}


def on_tensorflow() -> bool:
    return bool(keras.backend.backend() == "tensorflow")


def start() -> None:
    if on_tensorflow():
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


def run_scenarios(namespace: dict[str, Any]) -> dict[str, str]:
    """Run the scenarios on this rank; give each one's traceback, "" where it passed.

    After a failure the ranks may be out of step, so the others are not run.
    """
    start()
    warnings.simplefilter("error")
    # Keras's own, with the PyTorch of today.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(keras|torch)\b")
    outcomes = {}
    for name in names_in(namespace):
        outcomes[name] = ""
        try:
            keras.utils.set_random_seed(7)
            namespace[name]()
            basics.engine().barrier(f"after.{name}").wait()
        except Exception:
            outcomes[name] = traceback.format_exc()
            break
    hvd.shutdown()
    return outcomes


def data(samples: int = 24, width: int = 5, dtype: str = "float32") -> tuple[Any, Any]:
    """Make the samples of all ranks, the same on each."""
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(samples, width)).astype(dtype)
    return inputs, (inputs.sum(axis=1, keepdims=True) + 0.5).astype(dtype)


def mine(whole: Any) -> Any:
    """Pick this rank's samples, so that one rank's batches together are those of one process."""
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
    """Say whether the ranks' arrays are the same to the bit."""
    everyone = on_every_rank([array.tobytes() for array in arrays])
    return all(one == everyone[0] for one in everyone)


def sent_by(call: Callable[[], Any]) -> int:
    """Count the tensors that went between the ranks during a call."""

    def count() -> int:
        time.sleep(0.05)  # the engine tells what it counted at the end of a cycle
        return basics.engine().counters()["tensors"]

    begin = count()
    call()
    return count() - begin
