"""The errors of eager operations: each class is one of TensorFlow's and one of ours.

The kernel's error code decides the class; csrc/tensorflow/attachment.h has the codes. In a graph
TensorFlow itself raises the error, so that it has TensorFlow's class only. XLA gives every failure
of a custom call one code; there the message names the class if the world has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdlite import errors

# csrc/tensorflow/xla.cc ends a message with it if the call failed because the world has ended.
MARK = "[hvdlite.errors.CollectiveError]"


class AbortedError(tf.errors.AbortedError, errors.CollectiveError):  # type: ignore[misc]
    """The world is over for this rank."""


class FailedPreconditionError(tf.errors.FailedPreconditionError, errors.MismatchError):  # type: ignore[misc]
    """Ranks submitted different things under one name; the world goes on."""


class InvalidArgumentError(tf.errors.InvalidArgumentError, errors.ArgumentError):  # type: ignore[misc]
    """A call of this rank, or of the rank that the message names, is wrong; the world goes on."""


class ResourceExhaustedError(tf.errors.ResourceExhaustedError, errors.OutOfMemoryError):  # type: ignore[misc]
    """There is no memory for the operation; the world goes on."""


_KINDS: tuple[Any, ...] = (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)


def both(error: Any) -> Any:
    """Convert a tf.errors.OpError to one of the classes above, if there is one for it."""
    for kind in _KINDS:
        if type(error) is kind.__base__:
            return kind(error.node_def, error.op, error.message)
    return error


@contextmanager
def collective_errors() -> Iterator[None]:
    """Raise a CollectiveError where a graph or XLA raises TensorFlow's own error for it."""
    try:
        yield
    except tf.errors.OpError as error:
        ended = isinstance(error, tf.errors.AbortedError) or MARK in str(error.message)
        if isinstance(error, errors.CollectiveError) or not ended:
            raise
        raise errors.CollectiveError(error.message) from error
