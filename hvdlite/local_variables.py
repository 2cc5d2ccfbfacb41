"""Layers that are one rank's own: experts, or tables of a part of the data."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import ArgumentError


def variables_of(layers: Any) -> list[Any]:
    """List the trainable variables of a Keras layer, of several, or of None.

    Raises:
        ArgumentError: a layer is not built.
    """
    if layers is None:
        return []
    if not isinstance(layers, list | tuple | set):
        layers = [layers]
    for layer in layers:
        if not getattr(layer, "built", False):
            raise ArgumentError(
                f"the local layer {getattr(layer, 'name', layer)!r} has no weights yet; build the "
                "model first"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
