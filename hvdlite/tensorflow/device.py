"""Which GPU is this rank's: that of its local rank, unless somebody chose.

TensorFlow takes all GPUs that it sees, and memory on each; so it is shown one of them.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from hvdlite import _core, basics


def take_own_gpu(engine: _core.Engine | None) -> None:
    """Show TensorFlow the GPU of `local_rank`, if it has not begun yet and sees all of several.

    A script chooses by using TensorFlow before `init`, by `tf.config.set_visible_devices` before or
    after it, or by showing the process one GPU only. A rank that is alone on its host keeps all.

    Args:
        engine: None if there is no world; see `basics.watch`.
    """
    if engine is None or basics.local_size() == 1:
        return
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < 2 or tf.config.get_visible_devices("GPU") != gpus:
        return
    with contextlib.suppress(RuntimeError):  # TensorFlow is in use.
        tf.config.set_visible_devices(gpus[basics.local_rank() % len(gpus)], "GPU")
