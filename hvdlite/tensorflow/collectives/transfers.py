"""Sends of TensorFlow tensors from one rank to another, and their gradients.

They work eagerly and in `tf.function`; both ranks of a transfer call it in the same way, or give it
a name. Unnamed transfers are counted by source, destination and tag: in a function those of its
trace, so a tag names the transfer there.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.operation_names import next_number
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.collectives.requests import attributes, check, refuse_xla, take_turns
from hvdlite.tensorflow.graph.library import raw_ops
from hvdlite.tensorflow.graph.names import WireName, call_scalars, count_in_graph, set_number
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


def _wire(verb: str, peer: int, tag: int, name: str | None, process_set: ProcessSet) -> WireName:
    """Name a transfer without the name of the function, which may differ between the ranks."""
    number = set_number(process_set)
    if name:
        return WireName(name, process_set=number)
    kind = f"{verb}.{peer}.{tag}"
    if tf.executing_eagerly():
        return WireName(f"#send.{tag}", next_number(kind, number), number)
    return WireName(f"send.{tag}.{count_in_graph(kind, number)}", process_set=number)


def _send(last: tf.Tensor, tensor: tf.Tensor, wire: WireName, to: int) -> tf.Tensor:
    token = raw_ops().hvdlite_send(tensor, last, **attributes(wire), root=to)
    take_turns(wire, [token])
    if not tf.executing_eagerly():
        # It is stateful, so a function runs it, and takes a value, for which the token must be
        # computed: so the function sends although it does not use the token.
        tf.raw_ops.Assert(condition=tf.equal(token, 0.0), data=[token])
    return token


def _recv(last: tf.Tensor, tensor: tf.Tensor, wire: WireName, source: int) -> tf.Tensor:
    received = raw_ops().hvdlite_recv(tensor, last, **attributes(wire), root=source)
    take_turns(wire, [received])
    return received


def _back(operation: Any) -> tuple[WireName, int]:
    text = str(tf.compat.as_str_any(operation.get_attr("tensor_name")))
    wire = WireName(text, process_set=int(operation.get_attr("process_set")))
    return wire.derived("gradient"), int(operation.get_attr("root"))


@tf.RegisterGradient("HvdliteSend")  # type: ignore[untyped-decorator]
def _gradient_of_send(operation: Any, _: Any) -> list[Any]:
    """Receive the gradient that the other rank has for the tensor."""
    wire, to = _back(operation)
    tensor = operation.inputs[0]
    return [_recv(operation.inputs[-1], tf.zeros_like(tensor), wire, to), None]


@tf.RegisterGradient("HvdliteRecv")  # type: ignore[untyped-decorator]
def _gradient_of_recv(operation: Any, gradient: Any) -> list[Any]:
    """Send the gradient to the source; what `tensor` held had no effect."""
    wire, source = _back(operation)
    token = _send(operation.inputs[-1], tf.convert_to_tensor(gradient), wire, source)
    # These zeros wait for the transfer: an eager tape, and a graph, then run it.
    with tf.control_dependencies([token]):
        return [tf.zeros_like(gradient), None]


@traced_as_it_is
def send(
    tensor: Any,
    to: int,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Send a tensor to one rank, which calls `recv`; no other rank takes part.

    Eagerly it returns when the other rank has received.

    Args:
        tensor: any shape; the other rank has one of the same dtype and number of elements.
        to: the rank (in the world) that receives.
        tag: tells transfers between the same ranks apart. Those of one tag meet in the order in
            which each rank calls them.
        name: identifies the transfer on both ranks, instead of `tag` and a count.
        process_set: both ranks are its members; by default the world.

    Returns:
        A zero that depends on `tensor`. Its gradient for `tensor` is what rank `to` has: the tape
        of this rank receives it, and that of the other rank sends it.

    Raises:
        ArgumentError: the tensor cannot be sent, or XLA compiles the function; in a graph when the
            operation runs.
        tf.errors.InvalidArgumentError: `to` is this rank, or not a member.
        tf.errors.FailedPreconditionError: the ranks' tensors differ in dtype, number of elements or
            device.
        tf.errors.AbortedError: the world is over.

    Example:
        >>> with tf.GradientTape() as tape:  # on rank 0
        ...     sent = hvd.send(first_half(batch), to=1)
        >>> gradients = tape.gradient(sent, first_half.trainable_variables)
    """
    wire = _wire("send", to, tag, name, process_set)
    refuse_xla("send", wire.text)
    return _send(call_scalars(wire.number), check(tensor, wire.text), wire, to)


@traced_as_it_is
def recv(
    tensor: Any,
    source: int,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return a tensor that one rank sends with `send`.

    A function receives only what it uses, as it computes only what it uses.

    Args:
        tensor: says which shape and dtype the result has; its values do not matter. A tape that
            watches it sends the gradient of the result to rank `source`.
        source: the rank (in the world) that sends.
        tag: as in `send`.
        name: as in `send`.
        process_set: as in `send`.

    Raises:
        ArgumentError: as in `send`.

    Example:
        >>> place = tf.zeros([32, 64])
        >>> with tf.GradientTape() as tape:  # on rank 1
        ...     tape.watch(place)
        ...     value = loss(second_half(hvd.recv(place, source=0)))
        >>> variables = second_half.trainable_variables
        >>> *gradients, _ = tape.gradient(value, [*variables, place])  # sends to rank 0
    """
    wire = _wire("recv", source, tag, name, process_set)
    refuse_xla("recv", wire.text)
    return _recv(call_scalars(wire.number), check(tensor, wire.text), wire, source)
