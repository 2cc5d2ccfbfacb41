"""Keras layers whose gradients are not reduced, because each rank has its own (such as experts)."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import ArgumentError


def variables_of(layers: Any) -> list[Any]:
    """List the trainable variables of one Keras layer, or of several; none for None."""
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
