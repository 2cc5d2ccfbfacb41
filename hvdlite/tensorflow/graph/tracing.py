"""How TensorFlow traces our own code inside a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., object])


def traced_as_it_is(function: Function) -> Function:
    """Keep AutoGraph from rewriting this function and what it calls.

    Its branches and loops are decided while tracing, and rewriting them costs more than tracing.
    """
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept
