"""Variables that order operations: operations that touch the same one run in program order.

TensorFlow and XLA both keep the order of reads and writes of one variable. A *turn* is a variable
that is used only for this; its value means nothing.
"""

from __future__ import annotations

import tensorflow as tf

# They are kept permanently, because traced functions refer to them.
_turns: dict[str, tf.Tensor] = {}


def turn(name: str) -> tf.Tensor:
    """Return the handle of the turn of that name, an int64."""
    if name not in _turns:
        with tf.init_scope(), tf.device("CPU:0"):
            # A tf.function does not allow a tf.Variable to be created after its first call.
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[], shared_name=f"hvdlite.turn.{name}"
            )
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
        _turns[name] = handle
    return _turns[name]
