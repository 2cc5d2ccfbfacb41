"""Finds the module of this package that knows the framework with which Keras computes.

There is one for each backend, `on_torch` and `on_tensorflow`, and `keras2` for Keras 2. They are
imported by name at first use, so that hvdlite imports no framework that Keras has not imported.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import keras

from hvdlite.errors import ArgumentError

_BACKENDS = ("tensorflow", "torch")


def import_adapter() -> None:
    """Import hvdlite's adapter of Keras's backend, if there is one: it chooses the rank's GPU."""
    if keras.backend.backend() in _BACKENDS:
        importlib.import_module(f"hvdlite.{keras.backend.backend()}")


@functools.cache
def backend_adapter() -> Any:
    """Return the module of Keras' backend, with `allreduce_gradients`; raise if there is none."""
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise ArgumentError(
            f"hvdlite.keras does not work on Keras's {backend} backend; set KERAS_BACKEND to "
            f"{' or '.join(_BACKENDS)} before Keras is imported"
        )
    return importlib.import_module(f"hvdlite.keras.on_{backend}")


def keras_2(thing: Any) -> Any:
    """Return the module for `tf_keras` if the class of an object comes from there, else None."""
    # `tf_keras` is Keras 2, which works with TensorFlow only. A script that has an object of it has
    # imported it already; other scripts never import it.
    if any(each.__module__.partition(".")[0] == "tf_keras" for each in type(thing).__mro__):
        return importlib.import_module("hvdlite.keras.keras2")
    return None


def optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """List the variables of a model's optimizer, which may be None; build it first."""
    older = keras_2(optimizer)
    if older is not None:
        return list(older.optimizer_variables(optimizer, model.trainable_variables))
    if optimizer is None:
        return []
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return list(optimizer.variables)
