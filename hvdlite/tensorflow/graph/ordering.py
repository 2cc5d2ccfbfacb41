"""Variables that operations touch so that they run one after another, in the order of the program.

TensorFlow and XLA both keep the order of what reads and writes one variable. A *turn* is such a
variable; its value means nothing.
"""

from __future__ import annotations

import tensorflow as tf

# Functions refer to them for as long as they live.
_turns: dict[str, tf.Tensor] = {}


def turn(name: str) -> tf.Tensor:
    """Return the handle of the turn of that name, an int64.

    Made by hand: functions watch over tf.Variable, and refuse to make it later.
    """
    if name not in _turns:
        with tf.init_scope(), tf.device("CPU:0"):
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[], shared_name=f"hvdlite.turn.{name}"
            )
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
        _turns[name] = handle
    return _turns[name]
