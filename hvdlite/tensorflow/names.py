"""Wire names of TensorFlow's collectives, and the `terms` that go with them.

The words: a *wire name* is how ranks find each other in a collective. An eager call without a name
is *numbered*: its operation has a constant name as attribute, so that TensorFlow's cache of eager
kernels stays small, and the number travels in `terms`. In a graph, calls without a name are counted
per outermost function: every trace of that function gives the same names, whatever was traced
before it on this rank or on others.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from typing import Any, NamedTuple

import tensorflow as tf

from hvdlite.numbering import next_number

_used: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class WireName(NamedTuple):
    """A wire name: `text`, with ".number" behind it unless the number is negative."""

    text: str
    number: int = -1

    def plus(self, suffix: str) -> WireName:
        """Return the name of a part of this operation."""
        return WireName(f"{self.text}.{suffix}", self.number)


def wire_name(kind: str, name: str | None) -> WireName:
    """Name a call: as the user says, or numbered (eagerly), or counted (in a graph).

    The core does not cache names that start with '#'.
    """
    if name:
        return WireName(name)
    if tf.executing_eagerly():
        return WireName(f"#{kind}", next_number(kind))
    return WireName(graph_name(kind))


def graph_name(kind: str) -> str:
    """Return the next name of that kind in the function that is being traced."""
    graph = outermost_graph()
    name = f"{getattr(graph, 'name', 'graph')}.{kind}"
    return f"{name}.{_count(graph, name)}"


def derived_name(text: str) -> str:
    """Return a name that an operation made from another takes, the same one at every trace.

    In a graph the second one of that text is told from the first, since both may be in flight.
    """
    if tf.executing_eagerly():
        return text
    count = _count(outermost_graph(), text)
    return f"{text}.{count}" if count else text


def _count(graph: Any, name: str) -> int:
    counts = _used.setdefault(graph, Counter())
    counts[name] += 1
    return counts[name] - 1


def outermost_graph() -> Any:
    """Return the function at the top: branches, loops and inner functions share its counts."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def is_nested() -> bool:
    """Say whether what is traced now stands inside of a loop, a branch or an inner function."""
    if tf.executing_eagerly():
        return False
    return tf.compat.v1.get_default_graph() is not outermost_graph()


def terms(
    number: int = -1, prescale: float = 1.0, postscale: float = 1.0, weight: Any = None
) -> tf.Tensor:
    """Make the last input of an operation: [number, prescale, postscale, weight].

    Always an eager tensor that a graph captures: operations whose inputs are all constants of the
    graph would be computed once, by the optimizer, and never again.

    Args:
        number: of a numbered call, or -1.
        prescale: multiplies what goes in.
        postscale: multiplies what comes out.
        weight: of this rank in a weighted average, a number or a scalar tensor; None without.
    """
    if weight is None or isinstance(weight, int | float):
        make = _make_terms if number >= 0 else _constant_terms
        constant = math.nan if weight is None else float(weight)
        return make(float(number), prescale, postscale, constant)
    head = terms(number, prescale, postscale)[:3]
    return tf.concat([head, tf.reshape(tf.cast(weight, tf.float64), [1])], axis=0)


def _make_terms(*values: float) -> tf.Tensor:
    if not (tf.executing_eagerly() or hasattr(outermost_graph(), "outer_graph")):
        # A graph of TensorFlow 1 captures nothing; this is what its optimizer does not fold.
        constant = tf.constant(values, tf.float64)
        return tf.compat.v1.placeholder_with_default(constant, [4])
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(values, tf.float64)


@functools.lru_cache(maxsize=256)
def _kept_terms(*values: float) -> tf.Tensor:
    return _make_terms(*values)


def _constant_terms(*values: float) -> tf.Tensor:
    in_function = tf.executing_eagerly() or hasattr(outermost_graph(), "outer_graph")
    return _kept_terms(*values) if in_function else _make_terms(*values)
