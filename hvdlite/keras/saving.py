"""Loading models for training on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hvdlite.keras.distribution import is_distributed
from hvdlite.keras.optimizer import DistributedOptimizer
from hvdlite.ops import Compressor, NoneCompressor


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] | Compressor = NoneCompressor,
    legacy_opts: bool = False,
    *,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Load a model that Keras saved, with an optimizer that applies the gradients of all ranks.

    The optimizer keeps its state. Either every rank loads the file, or rank 0 alone loads it and
    `BroadcastGlobalVariablesCallback` sends its values to the others.

    Args:
        filepath: a file that `model.save` wrote, with a `DistributedOptimizer` or without.
        custom_optimizers: your own optimizer classes that the file may name.
        custom_objects: other classes and functions that the file may name, by that name.
        compression: how gradients are compressed while they travel, see `Compression`.
        legacy_opts: accepted for scripts written for Horovod; without effect.
        safe_mode: as for `keras.models.load_model`.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model; it is compiled if the saved model was.

    Raises:
        NotInitializedError: `hvd.init()` was not called.

    Example:
        >>> model = hvd.load_model("checkpoint.keras")
        >>> model.fit(inputs, labels)
    """
    objects: dict[str, Any] = {each.__name__: each for each in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression, **options)
    return model
