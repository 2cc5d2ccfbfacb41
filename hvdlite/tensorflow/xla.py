"""Functions that XLA compiles: one grouped allreduce as a custom call.

XLA runs no asynchronous operations, and its custom calls block in the order of the program, so all
tensors of a request travel in one call (csrc/tensorflow/xla.cc). On CPU; the call is registered for
no other platform.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import tensorflow as tf

from hvdlite.errors import ArgumentError
from hvdlite.ops import dtype_number
from hvdlite.tensorflow import library

_TARGET = "hvdlite_allreduce"


def in_xla_context() -> bool:
    """Say whether XLA will compile what is traced now."""
    # The module is private to TensorFlow; nothing public tells, and it is there in 2.16 to 2.21.
    from tensorflow.python.ops import control_flow_util

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return graph is not None and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def allreduce_group(
    tensors: Sequence[tf.Tensor],
    tensor_name: str,
    tensor_names: Sequence[str],
    op: int,
    prescale: float,
    postscale: float,
) -> list[tf.Tensor]:
    """Reduce tensors, which complete together, in one custom call.

    Args:
        tensors: of any dtypes that can be reduced, of shapes that are known while tracing.
        tensor_name: the wire name of the request.
        tensor_names: what messages call the tensors.
        op: the reduce operation.
        prescale: multiplies what goes in.
        postscale: multiplies what comes out.

    Raises:
        ArgumentError: XLA cannot compile it; the message says so, and that jit_compile=False helps.
    """
    _register()
    for tensor, name in zip(tensors, tensor_names, strict=True):
        if not tensor.shape.is_fully_defined():
            raise ArgumentError(
                f"'{name}' has the shape {tensor.shape} while XLA compiles it; give the function "
                "an input_signature without unknown dimensions, or use jit_compile=False"
            )
    from tensorflow.compiler.tf2xla.python import xla

    results: Sequence[tf.Tensor] = xla.custom_call_v2(
        _TARGET,
        list(tensors),
        [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors],
        backend_config=_describe(tensors, tensor_name, tensor_names, op, prescale, postscale),
        has_side_effect=True,
    )
    return list(results)


def _describe(
    tensors: Sequence[tf.Tensor],
    tensor_name: str,
    tensor_names: Sequence[str],
    op: int,
    prescale: float,
    postscale: float,
) -> str:
    """Write the request as the text that the C++ side reads."""
    parts = [str(op), float(prescale).hex(), float(postscale).hex(), quote(tensor_name, safe="")]
    for tensor, name in zip(tensors, tensor_names, strict=True):
        numbers = [dtype_number(tensor.dtype.name), quote(name, safe=""), *tensor.shape.as_list()]
        parts.append(",".join(map(str, numbers)))
    return ";".join(parts)


@functools.cache
def _register() -> None:
    """Make the custom call known to XLA.

    Raises:
        ArgumentError: this TensorFlow's XLA does not take it.
    """
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
