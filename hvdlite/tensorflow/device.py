"""Chooses the GPU of this rank: that of its local rank, unless the script has chosen one.

TensorFlow takes memory on all GPUs that it sees, so hvdlite makes only one visible to it.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from hvdlite import _core, basics


def take_own_gpu(engine: _core.Engine | None) -> None:
    """Make only the GPU of `local_rank` visible to TensorFlow, unless the script has chosen."""
    # A script chooses by using TensorFlow before `init`, by `tf.config.set_visible_devices` before
    # or after it, or if the process sees one GPU only. A rank that is alone on its host keeps all
    # GPUs. Without a world the engine is None, see `basics.watch`.
    if engine is None or basics.local_size() == 1:
        return
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < 2 or tf.config.get_visible_devices("GPU") != gpus:
        return
    with contextlib.suppress(RuntimeError):  # It is raised if TensorFlow is in use already.
        tf.config.set_visible_devices(gpus[basics.local_rank() % len(gpus)], "GPU")
