"""Loading models for training on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hvdlite.compression import Compressor, NoneCompressor
from hvdlite.keras.distribution import is_distributed
from hvdlite.keras.optimizer import DistributedOptimizer


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

    The optimizer keeps its state. Every rank loads; or rank 0 alone does, and
    `BroadcastGlobalVariablesCallback` sends the others what it loaded.

    Args:
        filepath: what `model.save` wrote, with a `DistributedOptimizer` or without.
        custom_optimizers: classes of your own that the file may name.
        custom_objects: other classes and functions that the file may name, by that name.
        compression: what happens to gradients on the way, see `Compression`.
        legacy_opts: accepted for scripts written for Horovod; without effect.
        safe_mode: as for `keras.models.load_model`.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model, compiled if it was saved so.

    Raises:
        NotInitializedError: `hvd.init()` comes first.

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
