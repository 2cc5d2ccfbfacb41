"""Functions that XLA compiles: one grouped allreduce as a custom call.

XLA has no asynchronous operations, and its custom calls block, so all tensors of a request travel
in one call (csrc/tensorflow/xla.cc). The call is registered for CPUs only.

XLA keeps no order between calls that do not depend on each other: ranks could block in different
calls, each waiting for the other. So each call of a function has a *turn* (see `tracing`) as input
and output, which makes it depend on the call that was traced before it, also in loops, branches and
inner functions.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.ops import dtype_number, travels_as
from hvdlite.tensorflow import library
from hvdlite.tensorflow.tracing import Reduction, WireName, outermost_graph, turn


def in_xla_context() -> bool:
    """Return whether XLA will compile the function that is being traced."""
    # The module is private to TensorFlow, and exists in 2.16 to 2.21; there is no public way.
    from tensorflow.python.ops import control_flow_util

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return graph is not None and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def allreduce_group(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce tensors, which complete together, in one custom call; refuse unknown shapes."""
    _register()
    platform = _platform()
    if platform != "CPU":
        raise ArgumentError(
            f"allreduce '{wire.text}' cannot be compiled by XLA for {platform}, only for CPU; "
            "use jit_compile=False"
        )
    for tensor, name in zip(tensors, wire.names, strict=True):
        if not tensor.shape.is_fully_defined():
            raise ArgumentError(
                f"'{name}' has the shape {tensor.shape} while XLA compiles it; give the function "
                "an input_signature without unknown dimensions, or use jit_compile=False"
            )
    from tensorflow.compiler.tf2xla.python import xla

    # Each outermost function has its own turn, because XLA locks the variables that a function
    # writes: functions that run in several threads must not wait for each other.
    handle = turn(outermost_graph().name)
    before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
    operands = [*tensors, before]
    results: list[tf.Tensor] = xla.custom_call_v2(
        "hvdlite_allreduce",
        operands,
        [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in operands],
        backend_config=_describe(tensors, wire, reduction),
        has_side_effect=True,
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=results[-1])
    return results[:-1]


def _platform() -> str:
    """Return the kind of device on which a function would run now."""
    with tf.init_scope():
        device = tf.DeviceSpec.from_string(tf.zeros([]).device)
    return str(device.device_type or "CPU")


def _describe(tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction) -> str:
    """Write the request as text for the C++ side."""
    scales = (struct.pack(">d", scale).hex() for scale in (reduction.prescale, reduction.postscale))
    parts = [str(reduction.op), str(wire.process_set), *scales, quote(wire.text, safe="")]
    for tensor, name in zip(tensors, wire.names, strict=True):
        dtype = dtype_number(tensor.dtype.name)
        travels = travels_as(reduction.wire, tensor.dtype.name)
        travels = dtype if travels is None else travels
        fields = [dtype, travels, quote(name, safe=""), *tensor.shape.as_list()]
        parts.append(",".join(map(str, fields)))
    return ";".join(parts)


@functools.cache
def _register() -> None:
    """Register the custom call with XLA, or raise an ArgumentError if XLA does not accept it."""
    library.raw_ops()
    register: Any = library.native().hvdlite_tensorflow_register_xla
    register.restype = ctypes.c_bool
    error = ctypes.create_string_buffer(500)
    if not register(error, ctypes.c_size_t(len(error))):
        why = error.value.decode(errors="replace")
        raise ArgumentError(
            f"XLA cannot call hvdlite with TensorFlow {tf.__version__} ({why}); "
            "use jit_compile=False"
        )
