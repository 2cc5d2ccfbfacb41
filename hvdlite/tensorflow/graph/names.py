"""Wire names of TensorFlow's collectives, and the `terms` that go with them.

The words: a *wire name* is how ranks find each other in a collective. An eager call without a name
is *numbered*: its operation has a constant name as attribute, so that TensorFlow's cache of eager
kernels stays small, and the number travels in `terms`. In a graph, calls without a name are counted
per process set and outermost function: every trace of that function gives the same names, whatever
was traced before it on this rank or on others.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from typing import Any, NamedTuple

import tensorflow as tf

from hvdlite.operation_names import next_number
from hvdlite.process_sets import ProcessSet, global_process_set, member_id, registered_id

_used: weakref.WeakKeyDictionary[Any, Counter[tuple[int, str]]] = weakref.WeakKeyDictionary()


class WireName(NamedTuple):
    """A wire name: `text`, with ".number" behind it unless the number is negative.

    Ranks meet in the process set of that number; each has names of its own.
    """

    text: str
    number: int = -1
    process_set: int = 0

    def plus(self, suffix: str) -> WireName:
        """Return the name of a part of this operation."""
        return self._replace(text=f"{self.text}.{suffix}")

    def derived(self, suffix: str) -> WireName:
        """Return a name that an operation made from this one takes, the same one at every trace.

        In a graph the second one of that text is told from the first, since both may be in flight.
        """
        name = self.plus(suffix)
        if tf.executing_eagerly():
            return name
        count = _count(outermost_graph(), name.text, self.process_set)
        return name.plus(str(count)) if count else name


def set_number(process_set: ProcessSet) -> int:
    """Return the number of a process set that an operation may be made for.

    In a graph it may be one that this rank is no member of: the operation then refuses when it
    runs, which a condition may prevent.

    Raises:
        ArgumentError: the set is not registered; eagerly, also if this rank is no member.
    """
    if process_set is global_process_set:
        return 0
    return member_id(process_set) if tf.executing_eagerly() else registered_id(process_set)


def wire_name(kind: str, name: str | None, process_set: ProcessSet) -> WireName:
    """Name a call: as the user says, or numbered (eagerly), or counted (in a graph).

    The core does not cache names that start with '#'.
    """
    number = set_number(process_set)
    if name:
        return WireName(name, process_set=number)
    if tf.executing_eagerly():
        return WireName(f"#{kind}", next_number(kind, number), number)
    return WireName(graph_name(kind, number), process_set=number)


def graph_name(kind: str, process_set: int) -> str:
    """Return the next name of that kind in the function that is being traced."""
    graph = outermost_graph()
    name = f"{getattr(graph, 'name', 'graph')}.{kind}"
    return f"{name}.{_count(graph, name, process_set)}"


def _count(graph: Any, name: str, process_set: int) -> int:
    counts = _used.setdefault(graph, Counter())
    counts[process_set, name] += 1
    return counts[process_set, name] - 1


def outermost_graph() -> Any:
    """Return the function at the top: branches, loops and inner functions share its counts.

    In a graph of TensorFlow 1 it is that graph: its branches have names that differ between ranks.
    """
    if in_session_graph():
        with tf.init_scope():
            return tf.compat.v1.get_default_graph()
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def in_session_graph() -> bool:
    """Say whether what is made now belongs to a graph of TensorFlow 1, which a session runs.

    Branches and loops in it do, too: what init_scope leaves them for is that graph.
    """
    if tf.executing_eagerly():
        return False
    with tf.init_scope():
        return not tf.executing_eagerly()


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
    if in_session_graph():
        # A graph of TensorFlow 1 captures nothing; this is what its optimizer does not fold.
        constant = tf.constant(values, tf.float64)
        return tf.compat.v1.placeholder_with_default(constant, [4])
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(values, tf.float64)


@functools.lru_cache(maxsize=256)
def _kept_terms(*values: float) -> tf.Tensor:
    return _make_terms(*values)


def _constant_terms(*values: float) -> tf.Tensor:
    return _make_terms(*values) if in_session_graph() else _kept_terms(*values)
