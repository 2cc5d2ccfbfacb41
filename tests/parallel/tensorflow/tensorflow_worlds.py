"""Worlds of TensorFlow: loaded by the ranks only, and many scenarios in one world.

`tf` and `hvd` import their modules at first use, so that pytest's own process does not.
A test file has functions `scenario_x()` that run on every rank and assert, as in `scenarios`. One
with an argument `form` runs twice: `form` returns a function unchanged, or as a tf.function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel.scenarios import Later, run_all

ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2"}


tf: Any = Later("tensorflow")
hvd: Any = Later("hvdlite.tensorflow")
keras: Any = Later("keras")


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = tf.function(function)
    return compiled


def start() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


def run_scenarios(namespace: dict[str, Any]) -> dict[str, str]:
    """Run the scenarios on this rank, those with a form in each form."""
    return run_all(namespace, start, forms=(eagerly, in_graph))


def mine(*shape: int, dtype: Any = "float32") -> Any:
    """Make a tensor of this rank's number plus one."""
    return tf.cast(tf.fill(shape, hvd.rank() + 1), dtype)


def ranks() -> range:
    return range(1, hvd.size() + 1)


def same(tensor: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return whether all elements equal the expected value."""
    if not tf.is_tensor(expected):
        expected = tf.constant(expected, tf.float64)
    difference = tf.abs(tf.cast(tensor, tf.float64) - tf.cast(expected, tf.float64))
    return bool(tf.reduce_all(difference <= tolerance))
