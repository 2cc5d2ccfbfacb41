"""Loops in a graph of TensorFlow 1: their iterations must not overlap.

An operation in a loop has the same name in each iteration. TensorFlow starts an iteration as soon
as its inputs are ready, by default up to ten at a time. So two ranks might start them in different
orders, and reduce tensors of different iterations together. In functions a variable prevents this
(`requests.take_turns`); in a graph of TensorFlow 1 the script would have to initialise it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.errors import ArgumentError


def order_iterations(name: str, results: Sequence[tf.Tensor]) -> None:
    """Make each iteration of a TensorFlow 1 loop wait for the results of the one before."""
    graph = tf.compat.v1.get_default_graph()
    _refuse_parallel_iterations(name, graph)
    if any(_is_body(outer) for outer in _outer_graphs(graph)):
        raise ArgumentError(
            f"'{name}' is in a branch, a function or a loop in the body of a tf.while_loop of "
            "TensorFlow 1, where ranks could mix up the iterations; call it in the body itself, or "
            "run the loop in a tf.function"
        )
    if _is_body(graph):
        graph.control_outputs.extend(result.op for result in results)


def _is_body(graph: Any) -> bool:
    # This class is private to TensorFlow, and exists in 2.16 to 2.21; there is no public way.
    from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

    return isinstance(graph, WhileBodyFuncGraph)


def _outer_graphs(graph: Any) -> Iterator[Any]:
    while (graph := getattr(graph, "outer_graph", None)) is not None:
        yield graph


def _refuse_parallel_iterations(name: str, graph: Any) -> None:
    """Refuse surrounding loops of control flow v1 that run several iterations at a time."""
    loop = graph._get_control_flow_context()
    while loop is not None:
        at_once = loop.parallel_iterations if loop.IsWhileContext() else 1
        if at_once != 1:
            raise ArgumentError(
                f"'{name}' is in a loop of control flow v1 that may run {at_once} iterations at a "
                "time, where ranks could mix them up; give tf.while_loop parallel_iterations=1, "
                "or call tf.compat.v1.enable_control_flow_v2()"
            )
        loop = loop.outer_context
