"""What this package needs of the framework that Keras computes with.

That is in one module for each backend, `_torch` and `_tensorflow`, and for Keras 2 in `_keras2`.
They are imported by name at first use, so that no framework is imported that Keras has not imported
already.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import keras

from hvdlite.errors import ArgumentError

_BACKENDS = ("tensorflow", "torch")


def import_adapter() -> None:
    """Import the adapter of Keras's backend, if there is one: it gives each rank its own GPU."""
    if keras.backend.backend() in _BACKENDS:
        importlib.import_module(f"hvdlite.{keras.backend.backend()}")


@functools.cache
def seam() -> Any:
    """Return the module of Keras's backend, which has `allreduce_gradients` and `Compression`.

    Raises:
        ArgumentError: this backend has none; the message says which have.
    """
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise ArgumentError(
            f"hvdlite.keras does not work on Keras's {backend} backend; set KERAS_BACKEND to "
            f"{' or '.join(_BACKENDS)} before Keras is imported"
        )
    return importlib.import_module(f"hvdlite.keras._{backend}")


def keras_2(thing: Any) -> Any:
    """Return the module that knows `tf_keras` if an object's class is of that, None if not.

    `tf_keras` is Keras 2, and knows no framework but TensorFlow. Whoever holds an object of it has
    imported it; others never do.
    """
    if any(each.__module__.partition(".")[0] == "tf_keras" for each in type(thing).__mro__):
        return importlib.import_module("hvdlite.keras._keras2")
    return None
