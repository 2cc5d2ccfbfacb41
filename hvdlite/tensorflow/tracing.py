"""What a call is given, eagerly and while TensorFlow traces a function: wire name, scalars, turn.

The *wire name* identifies a collective on all ranks. An eager call without a name is *numbered*:
its operation has a constant name as attribute, so that TensorFlow's cache of eager kernels stays
small, and the number travels in `call_scalars`. In a graph, calls without a name are counted per
process set and outermost function: every trace of that function gives the same names, whatever was
traced before it on this rank or on others.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.ops import next_number
from hvdlite.process_sets import ProcessSet, global_process_set, member_id, registered_id

_used: weakref.WeakKeyDictionary[Any, Counter[tuple[int, str]]] = weakref.WeakKeyDictionary()


class Reduction(NamedTuple):
    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    weight: Any = None  # A number or a scalar tensor makes the average a weighted one.
    wire: int | None = None  # The core's dtype as which tensors travel, see `travels_as`.


class WireName(NamedTuple):
    """A wire name: `text`, followed by ".number" unless the number is negative."""

    text: str
    number: int = -1
    process_set: int = 0  # its number; each process set has its own names
    tensors: Sequence[str] | None = None  # their names; None: one has that of the operation

    @property
    def names(self) -> list[str]:
        """The names of the tensors, for messages."""
        return [self.text] if self.tensors is None else list(self.tensors)

    def grouped(self, count: int) -> WireName:
        """Return the name of an operation of so many numbered tensors."""
        return self._replace(tensors=[f"{self.text}.{index}" for index in range(count)])

    def plus(self, suffix: str) -> WireName:
        """Return the name of a part of this operation."""
        return self._replace(text=f"{self.text}.{suffix}", tensors=None)

    def derived(self, suffix: str) -> WireName:
        """Return a name for an operation derived from this one, the same name at every trace."""
        name = self.plus(suffix)
        if tf.executing_eagerly():
            return name
        # A graph counts derived operations of one name, because both may be in flight.
        count = _count(outermost_graph(), name.text, self.process_set)
        return name.plus(str(count)) if count else name


def set_number(process_set: ProcessSet) -> int:
    """Return the number of a process set for which an operation may be made, or raise."""
    if process_set is global_process_set:
        return 0
    # In a graph this rank need not be a member: the operation then raises the error when it runs,
    # which a condition may prevent.
    return member_id(process_set) if tf.executing_eagerly() else registered_id(process_set)


def wire_name(kind: str, name: str | None, process_set: ProcessSet) -> WireName:
    """Name a call: by the user's name, or numbered (eagerly), or counted (in a graph)."""
    number = set_number(process_set)
    if name:
        return WireName(name, process_set=number)
    if tf.executing_eagerly():
        # The core does not cache names that start with '#'.
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
    """Return the outermost function: its branches, loops and inner functions share its counts."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def is_nested() -> bool:
    """Return whether a loop, a branch or an inner function is being traced."""
    if tf.executing_eagerly():
        return False
    return tf.compat.v1.get_default_graph() is not outermost_graph()


def in_xla_context() -> bool:
    """Return whether XLA will compile the function that is being traced."""
    # The module is private to TensorFlow, and exists in 2.16 to 2.21; there is no public way.
    from tensorflow.python.ops import control_flow_util

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return graph is not None and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def call_scalars(
    number: int = -1, prescale: float = 1.0, postscale: float = 1.0, weight: Any = None
) -> tf.Tensor:
    """Make an operation's last input (`terms` in csrc): [number, prescale, postscale, weight]."""
    # It is always an eager tensor that a graph captures. If all inputs of an operation were
    # constants of the graph, TensorFlow's graph optimizer would run the operation once and fold it
    # away. The number is -1 for a call without one; the weight, a number or a scalar tensor, None
    # for a plain average.
    if not tf.executing_eagerly():
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise ArgumentError(
                    "a graph that a session runs cannot call hvdlite; call it eagerly, or in a "
                    "tf.function"
                )
    if weight is None or isinstance(weight, int | float):
        make = _make_call_scalars if number >= 0 else _kept_call_scalars
        constant = math.nan if weight is None else float(weight)
        return make(float(number), prescale, postscale, constant)
    head = call_scalars(number, prescale, postscale)[:3]
    return tf.concat([head, tf.reshape(tf.cast(weight, tf.float64), [1])], axis=0)


def _make_call_scalars(*values: float) -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(values, tf.float64)


_kept_call_scalars = functools.lru_cache(maxsize=256)(_make_call_scalars)


@functools.cache  # They are kept permanently, because traced functions refer to them.
def turn(name: str) -> tf.Tensor:
    """Return the handle of the turn of that name, an int64 variable whose value means nothing.

    TensorFlow and XLA run operations that touch one variable in the order of the program.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        # A tf.function does not allow a tf.Variable to be created after its first call.
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.int64, shape=[], shared_name=f"hvdlite.turn.{name}"
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
    return handle


Function = TypeVar("Function", bound=Callable[..., object])


def traced_as_it_is(function: Function) -> Function:
    """Keep AutoGraph from rewriting this function and the functions that it calls."""
    # Their branches and loops are decided while tracing, and rewriting them would cost more than
    # tracing.
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept
