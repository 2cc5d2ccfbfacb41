"""The layer above the operations: it checks, takes and returns dense tensors of any dtypes.

It decides how a call reaches the core: as one operation per dtype or, in a function that XLA
compiles, as one custom call. It also registers the gradients of the operations with TensorFlow.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import tensorflow as tf

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.ops import (
    Compressor,
    NoneCompressor,
    cast_in_core,
    dtype_number,
    send_compressed,
    travels_as,
)
from hvdlite.process_sets import process_set_by_id
from hvdlite.tensorflow.library import native, raw_ops
from hvdlite.tensorflow.tracing import (
    Reduction,
    WireName,
    call_scalars,
    in_xla_context,
    is_nested,
    outermost_graph,
    turn,
)


def check(tensor: Any, name: str, op: int | None = None) -> tf.Tensor:
    """Return a tensor that the core can send, and reduce by `op`, or raise an ArgumentError."""
    # In a graph the operation raises NotInitializedError when it runs.
    if tf.executing_eagerly():
        basics.engine()
    if isinstance(tensor, tf.IndexedSlices):
        raise ArgumentError(f"'{name}' is tf.IndexedSlices; use tf.convert_to_tensor()")
    try:
        tensor = tf.convert_to_tensor(tensor)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"'{name}' is a {type(tensor).__name__}, not a tensor; use "
            "broadcast_object/allgather_object for any object"
        ) from error
    dtype_number(tensor.dtype.name, name)
    if op is not None:
        ops.check_reducible(tensor.dtype.name, name, op)
    return tensor


def allreduce(
    tensors: Sequence[Any],
    wire: WireName,
    reduction: Reduction,
    compression: type[Compressor] | Compressor = NoneCompressor,
) -> list[tf.Tensor]:
    """Reduce tensors; those of one dtype complete together."""
    if not tensors:
        return []
    checked = [check(*each, reduction.op) for each in zip(tensors, wire.names, strict=True)]
    cast, by_hand = cast_in_core(compression, reduction.op)
    reduction = reduction._replace(wire=cast)
    reduce = _allreduce_in_xla if in_xla_context() else _allreduce
    return send_compressed(
        lambda sent: take_turns(wire, reduce(sent, wire, reduction)), checked, by_hand
    )


def _allreduce(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    op, cast, weight = reduction.op, reduction.wire, reduction.weight
    last = call_scalars(wire.number, reduction.prescale, reduction.postscale, weight)
    results = _per_dtype(
        lambda part, wire: _allreduce_with(last, part, wire, op, cast), tensors, wire
    )
    if weight is None:
        return results
    why = "a weighted average has no gradient; leave out weight=, or use tf.stop_gradient()"
    return [tf.raw_ops.PreventGradient(input=one, message=why) for one in results]


def _allreduce_in_xla(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce in one custom call; the gradient is another custom call."""
    if reduction.weight is not None:
        raise ArgumentError(
            f"allreduce '{wire.text}' with weight= cannot be compiled by XLA; use jit_compile=False"
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            ops.check_differentiable("allreduce", wire.text, reduction.op)
            back = wire.derived("gradient")._replace(tensors=wire.names)
            return _allreduce_in_xla(_as_dtypes_of(tensors, upstream), back, reduction)

        return _custom_call(tensors, wire, reduction), gradient

    results: list[tf.Tensor] = reduce(*tensors)
    return results


def _custom_call(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce tensors, which complete together, in one custom call; refuse unknown shapes."""
    # XLA has no asynchronous operations, and its custom calls block, so all tensors of a request
    # travel in one call (csrc/tensorflow/xla.cc), which is registered for CPUs only.
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

    # XLA keeps no order between calls that do not depend on each other: ranks could block in
    # different calls, each waiting for the other. A turn as input and output makes a call depend on
    # the one that was traced before it, also in loops, branches and inner functions. Each outermost
    # function has its own, because XLA locks the variables that a function writes: functions that
    # run in several threads must not wait for each other.
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
    raw_ops()
    register: Any = native().hvdlite_tensorflow_register_xla
    register.restype = ctypes.c_bool
    error = ctypes.create_string_buffer(500)
    if not register(error, ctypes.c_size_t(len(error))):
        why = error.value.decode(errors="replace")
        raise ArgumentError(
            f"XLA cannot call hvdlite with TensorFlow {tf.__version__} ({why}); "
            "use jit_compile=False"
        )


def broadcast(tensors: Sequence[Any], wire: WireName, root_rank: int) -> list[tf.Tensor]:
    _refuse_xla("broadcast", wire.text)
    checked = [check(*each) for each in zip(tensors, wire.names, strict=True)]
    last, operation = call_scalars(wire.number), raw_ops().hvdlite_broadcast
    outputs = _per_dtype(
        lambda part, wire: operation(part, last, **_attributes(wire), root=root_rank), checked, wire
    )
    return take_turns(wire, outputs)


def allgather(tensors: Sequence[Any], wire: WireName) -> list[tf.Tensor]:
    checked = _check_rows("allgather", tensors, wire)
    last = call_scalars(wire.number)
    outputs = _per_dtype(lambda *part: _allgather_with(last, *part)[0], checked, wire)
    return take_turns(wire, outputs)


def allgather_sizes(tensor: tf.Tensor, wire: WireName) -> tuple[tf.Tensor, tf.Tensor]:
    """Gather one tensor; return also the number of rows of each rank (int64)."""
    checked = _check_rows("allgather", [tensor], wire)
    outputs, sizes = _allgather_with(call_scalars(wire.number), checked, wire)
    return take_turns(wire, outputs)[0], tf.reshape(sizes, [-1])


def reducescatter(
    tensors: Sequence[Any], wire: WireName, reduction: Reduction, compression: Any
) -> list[tf.Tensor]:
    """Reduce tensors and return this rank's rows; those of one dtype complete together."""
    checked = _check_rows("reducescatter", tensors, wire, reduction.op)
    last = call_scalars(wire.number, reduction.prescale, reduction.postscale)
    operation, op = raw_ops().hvdlite_reducescatter, reduction.op

    def reduce(sent: list[tf.Tensor]) -> list[tf.Tensor]:
        outputs = _per_dtype(
            lambda part, wire: operation(part, last, **_attributes(wire), op=op), sent, wire
        )
        return take_turns(wire, outputs)

    return send_compressed(reduce, checked, compression)


def alltoall(tensor: Any, splits: tf.Tensor, wire: WireName) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to each rank; return the rows from all, and how many came from each."""
    # `splits` and the second result are int64. Empty splits give each rank the same number of rows.
    (tensor,) = _check_rows("alltoall", [tensor], wire)
    output, received = _alltoall_with(call_scalars(wire.number), tensor, splits, wire)
    take_turns(wire, [output])
    return output, received


def query(what: str, process_set: int | None = None, name: str | None = None) -> tf.Tensor:
    """Return a property of the world ("rank", "size"...) or of a process set, an int32 scalar.

    A set has "rank" (-1 if this rank is not a member), "size", and "included" (0 or 1).
    """
    if in_xla_context():
        # A compiled function contains the value of the time of tracing; a graph reads it when it
        # runs.
        if process_set is None:
            return tf.constant(getattr(basics, what)(), tf.int32)
        known = process_set_by_id(process_set)
        value = getattr(known, what)() if known.included() or what != "rank" else -1
        return tf.constant(int(value), tf.int32)
    if tf.executing_eagerly():
        basics.engine()
    if process_set is not None and what != "included":
        what = f"set_{what}"
    last = call_scalars()
    return raw_ops().hvdlite_query(last, what=what, process_set=process_set or 0, name=name)


def take_turns(wire: WireName, results: list[tf.Tensor]) -> list[tf.Tensor]:
    """Keep the runs of a loop's body or of an inner function from overlapping; return `results`."""
    # Each run uses the same names, and two operations of one name cannot be in flight together.
    # TensorFlow runs operations that touch one variable in the order of the program. So each run
    # ends with a write to a variable of that name and process set, when all of `results` are ready.
    # Calls that XLA compiles order themselves.
    if is_nested() and not in_xla_context():
        with tf.control_dependencies(results):
            handle = turn(f"{wire.text}@{wire.process_set}")
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.constant(1, tf.int64))
    return results


# The operations on tensors of one dtype. `last` is the `call_scalars` of the operation; gradients
# use that of the operation whose gradient they are (see below).


def _allreduce_with(
    last: tf.Tensor,
    tensors: Sequence[tf.Tensor],
    wire: WireName,
    op: int,
    cast: int | None = None,
) -> list[tf.Tensor]:
    """Reduce tensors; `cast` is the core's dtype while they travel."""
    travels = travels_as(cast, tensors[0].dtype.name)
    number = -1 if travels is None else travels
    return raw_ops().hvdlite_allreduce(  # type: ignore[no-any-return]
        tensors, last, **_attributes(wire), op=op, wire=number
    )


def _allgather_with(
    last: tf.Tensor, tensors: Sequence[tf.Tensor], wire: WireName
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Gather tensors; return them and how many rows each rank had, by tensor and rank."""
    outputs, sizes = raw_ops().hvdlite_allgather(tensors, last, **_attributes(wire))
    return outputs, sizes


def _alltoall_with(
    last: tf.Tensor, tensor: tf.Tensor, splits: tf.Tensor, wire: WireName
) -> tuple[tf.Tensor, tf.Tensor]:
    output, received = raw_ops().hvdlite_alltoall(
        tensor, splits, last, tensor_name=wire.text, process_set=wire.process_set
    )
    return output, received


def _attributes(wire: WireName) -> dict[str, Any]:
    return {
        "tensor_name": wire.text,
        "process_set": wire.process_set,
        "tensor_names": wire.names,
    }


def _per_dtype(
    call: Callable[[list[tf.Tensor], WireName], Sequence[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
    wire: WireName,
) -> list[tf.Tensor]:
    """Call once for each dtype, with the tensors of that dtype; return all results in order."""
    groups: dict[tf.DType, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(position)
    results: list[Any] = [None] * len(tensors)
    for dtype, positions in groups.items():
        part = wire if len(groups) == 1 else wire.plus(dtype.name)
        part = part._replace(tensors=[wire.names[i] for i in positions])
        outputs = call([tensors[i] for i in positions], part)
        for position, output in zip(positions, outputs, strict=True):
            results[position] = output
    return results


# The gradients of the operations are Horovod's: if a rank's input went to all ranks, its gradient
# is the mean of the gradients that these ranks have for it (docs/collectives.md has the formulas).
# Each is a collective itself, with the `call_scalars` of its operation, and can be differentiated
# again.


def _wire_of(operation: Any) -> WireName:
    text = str(tf.compat.as_str_any(operation.get_attr("tensor_name")))
    return WireName(text, process_set=int(operation.get_attr("process_set")))


def _reduce(
    operation: Any, gradients: tuple[Any, ...], op: int, cast: int | None = None
) -> list[tf.Tensor]:
    dense = _as_dtypes_of(operation.outputs, gradients)
    wire = _wire_of(operation).derived("gradient").grouped(len(dense))
    return take_turns(wire, _allreduce_with(operation.inputs[-1], dense, wire, op, cast))


@tf.RegisterGradient("HvdliteAllreduce")  # type: ignore[untyped-decorator]
def _gradients_of_allreduce(operation: Any, *gradients: Any) -> list[Any]:
    """Reduce the gradients in the same way, with the same scales and the same cast."""
    op = int(operation.get_attr("op"))
    ops.check_differentiable("allreduce", _wire_of(operation).text, op)
    cast = int(operation.get_attr("wire"))
    return [*_reduce(operation, gradients, op, None if cast < 0 else cast), None]


@tf.RegisterGradient("HvdliteAllgather")  # type: ignore[untyped-decorator]
def _gradients_of_allgather(operation: Any, *gradients: Any) -> list[Any]:
    """Average the ranks' gradients and take the rows that this rank gave."""
    means = _reduce(operation, gradients[:-1], ops.Average)  # The last output has the sizes.
    rank = query("rank", _wire_of(operation).process_set)
    results = []
    for index, mean in enumerate(means):
        sizes = operation.outputs[-1][index]
        start = tf.reduce_sum(sizes[:rank])
        own = mean[start : start + sizes[rank]]
        own.set_shape(operation.inputs[index].shape)
        results.append(own)
    return [*results, None]


@tf.RegisterGradient("HvdliteReducescatter")  # type: ignore[untyped-decorator]
def _gradients_of_reducescatter(operation: Any, *gradients: Any) -> list[Any]:
    """Gather the ranks' gradients, with the same scales; for a sum times the number of ranks."""
    op = int(operation.get_attr("op"))
    wire = _wire_of(operation)
    ops.check_differentiable("reducescatter", wire.text, op)
    last = operation.inputs[-1]
    factor = last[1] * last[2]
    if op == ops.Sum:
        factor *= tf.cast(query("size", wire.process_set), tf.float64)
    back = wire.derived("gradient").grouped(len(gradients))
    dense = _as_dtypes_of(operation.outputs, gradients)
    scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in dense]
    results = take_turns(back, _allgather_with(last, scaled, back)[0])
    for result, tensor in zip(results, operation.inputs, strict=False):
        result.set_shape(tensor.shape)
    return [*results, None]


@tf.RegisterGradient("HvdliteAlltoall")  # type: ignore[untyped-decorator]
def _gradients_of_alltoall(operation: Any, gradient: Any, _: Any) -> list[Any]:
    """Send the gradient of each row back to the rank that sent the row."""
    wire = _wire_of(operation).derived("gradient")
    (dense,) = _as_dtypes_of(operation.outputs, [gradient])
    back, _ = _alltoall_with(operation.inputs[-1], dense, operation.outputs[1], wire)
    take_turns(wire, [back])
    back.set_shape(operation.inputs[0].shape)
    return [back, None, None]


@tf.RegisterGradient("HvdliteBroadcast")  # type: ignore[untyped-decorator]
def _gradients_of_broadcast(operation: Any, *gradients: Any) -> list[Any]:
    """Average the ranks' gradients on the root; the inputs of the others had no effect."""
    means = _reduce(operation, gradients, ops.Average)
    is_root = tf.equal(query("rank"), int(operation.get_attr("root")))
    return [*(tf.where(is_root, mean, tf.zeros_like(mean)) for mean in means), None]


def _as_dtypes_of(outputs: Sequence[tf.Tensor], gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return dense gradients of the outputs' dtypes, because all ranks need the same dtype."""
    pairs = zip(gradients, outputs, strict=False)
    return [tf.cast(tf.convert_to_tensor(one), output.dtype) for one, output in pairs]


def _refuse_xla(verb: str, name: str) -> None:
    if in_xla_context():
        raise ArgumentError(f"{verb} '{name}' cannot be compiled by XLA; use jit_compile=False")


def _check_rows(
    verb: str, tensors: Sequence[Any], wire: WireName, op: int | None = None
) -> list[tf.Tensor]:
    checked = [check(*each, op) for each in zip(tensors, wire.names, strict=True)]
    for tensor, name in zip(checked, wire.names, strict=True):
        _refuse_xla(verb, name)
        if tensor.shape.rank == 0:
            raise ArgumentError(f"{verb} '{name}' of a scalar; use tf.reshape(tensor, [1])")
    return checked
