"""Worlds of TensorFlow: loaded by the ranks only, and many scenarios in one world.

`tf` and `hvd` import what they stand for at first use: pytest's own process does without.
A test file has functions `scenario_x()` that run on every rank and assert, as in `scenarios`. One
with an argument `form` runs twice: `form` leaves a function as it is, or makes a tf.function of it.
"""

from __future__ import annotations

import importlib
import inspect
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from hvdlite import basics
from parallel.scenarios import names_in

ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2"}
TIMEOUT = 100.0


class _Later:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


tf: Any = _Later("tensorflow")
hvd: Any = _Later("hvdlite.tensorflow")
keras: Any = _Later("keras")


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
    """Run the scenarios on this rank; give each one's traceback, "" where it passed.

    After a failure the ranks may be out of step, so the others are not run.
    """
    start()
    warnings.simplefilter("error")
    outcomes = {}
    for name in names_in(namespace):
        outcomes[name] = ""
        try:
            scenario = namespace[name]
            forms = (eagerly, in_graph) if inspect.signature(scenario).parameters else ()
            for form in forms:
                scenario(form)
            if not forms:
                scenario()
            basics.engine().barrier(f"after.{name}").wait()
        except Exception:
            outcomes[name] = traceback.format_exc()
            break
    hvd.shutdown()
    return outcomes


def mine(*shape: int, dtype: Any = "float32") -> Any:
    """Make a tensor of this rank's number plus one."""
    return tf.cast(tf.fill(shape, hvd.rank() + 1), dtype)


def ranks() -> range:
    return range(1, hvd.size() + 1)


def same(tensor: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Say whether all elements equal what is expected."""
    if not tf.is_tensor(expected):
        expected = tf.constant(expected, tf.float64)
    difference = tf.abs(tf.cast(tensor, tf.float64) - tf.cast(expected, tf.float64))
    return bool(tf.reduce_all(difference <= tolerance))


def tensors_sent_by(function: Callable[[], Any]) -> int:
    """Count the tensors that went between the ranks during a call."""

    def count() -> int:
        time.sleep(0.05)  # the engine tells what it counted at the end of a cycle
        return basics.engine().counters()["tensors"]

    begin = count()
    function()
    return count() - begin
