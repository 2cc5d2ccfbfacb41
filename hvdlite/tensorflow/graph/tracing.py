"""Controls how TensorFlow traces our own code inside a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., object])


def traced_as_it_is(function: Function) -> Function:
    """Keep AutoGraph from rewriting this function and the functions that it calls."""
    # Their branches and loops are decided while tracing, and rewriting them would cost more than
    # tracing.
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept
