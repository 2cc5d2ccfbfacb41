"""The errors of eager operations: TensorFlow's, by the code that the kernel gave, and ours as well.

In a graph TensorFlow raises outside of our code, and its own class is all there is. The codes are
given in csrc/tensorflow/pending.cc.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import errors


class AbortedError(tf.errors.AbortedError, errors.CollectiveError):  # type: ignore[misc]
    """The world is over for this rank."""


class FailedPreconditionError(tf.errors.FailedPreconditionError, errors.MismatchError):  # type: ignore[misc]
    """Ranks disagree about a tensor; the world goes on."""


class InvalidArgumentError(tf.errors.InvalidArgumentError, errors.ArgumentError):  # type: ignore[misc]
    """A call is wrong, of this rank or of the one that the message names; the world goes on."""


class ResourceExhaustedError(tf.errors.ResourceExhaustedError, errors.OutOfMemoryError):  # type: ignore[misc]
    """There is no memory for the operation; the world goes on."""


_KINDS: tuple[Any, ...] = (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)


def both(error: Any) -> Any:
    """Return an error that is TensorFlow's and ours; others as they are.

    Args:
        error: a tf.errors.OpError that an eager operation raised.
    """
    for kind in _KINDS:
        if type(error) is kind.__base__:
            return kind(error.node_def, error.op, error.message)
    return error
