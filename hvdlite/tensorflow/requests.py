"""The layer above the operations: it takes and returns checked dense tensors of any dtypes.

It decides how a call reaches the core: as one operation per dtype or, in a function that XLA
compiles, as one custom call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.ops import dtype_number, travels_as
from hvdlite.process_sets import process_set_by_id
from hvdlite.tensorflow import xla
from hvdlite.tensorflow.library import raw_ops
from hvdlite.tensorflow.tracing import Reduction, WireName, call_scalars, is_nested, turn

_SUM = Reduction(ops.Sum)


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
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce checked tensors; those of one dtype complete together. Callers call `take_turns`."""
    if reduction.weight is not None and reduction.op != ops.Average:
        raise ArgumentError("weight goes with op=hvd.Average")
    if not tensors:
        return []
    if xla.in_xla_context():
        return _allreduce_in_xla(tensors, wire, reduction)
    if reduction.weight is not None:
        return _allreduce_weighted(tensors, wire, reduction)
    return _allreduce(tensors, wire, reduction)


def _allreduce(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    last = call_scalars(wire.number, reduction.prescale, reduction.postscale, reduction.weight)
    op, cast = reduction.op, reduction.wire
    return _per_dtype(lambda part, wire: allreduce_with(last, part, wire, op, cast), tensors, wire)


def _allreduce_weighted(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce with a weight; in the gradient each rank takes its weight's share of the sum."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            weight = tf.cast(reduction.weight, tf.float64)
            back = wire.derived("gradient")._replace(tensors=wire.names)
            (total,) = _allreduce([weight], back.plus("weight"), _SUM)
            share = tf.math.divide_no_nan(weight, total)
            plain = reduction._replace(op=ops.Sum, weight=None)
            summed = _allreduce(as_dtypes_of(tensors, upstream), back, plain)
            return [one * tf.cast(share, one.dtype) for one in summed]

        return _allreduce(tensors, wire, reduction), gradient

    results: list[tf.Tensor] = reduce(*tensors)
    return results


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
            check_differentiable(wire.text, reduction.op)
            back = wire.derived("gradient")._replace(tensors=wire.names)
            return _allreduce_in_xla(as_dtypes_of(tensors, upstream), back, reduction)

        return xla.allreduce_group(tensors, wire, reduction), gradient

    results: list[tf.Tensor] = reduce(*tensors)
    return results


def broadcast(tensors: Sequence[tf.Tensor], wire: WireName, root_rank: int) -> list[tf.Tensor]:
    _refuse_xla("broadcast", wire.text)
    last, operation = call_scalars(wire.number), raw_ops().hvdlite_broadcast
    outputs = _per_dtype(
        lambda part, wire: operation(part, last, **_attributes(wire), root=root_rank), tensors, wire
    )
    return take_turns(wire, outputs)


def allgather(tensors: Sequence[tf.Tensor], wire: WireName) -> list[tf.Tensor]:
    _check_rows("allgather", tensors, wire)
    last = call_scalars(wire.number)
    outputs = _per_dtype(lambda *part: allgather_with(last, *part)[0], tensors, wire)
    return take_turns(wire, outputs)


def allgather_sizes(tensor: tf.Tensor, wire: WireName) -> tuple[tf.Tensor, tf.Tensor]:
    """Gather one checked tensor; return also the number of rows of each rank (int64)."""
    _check_rows("allgather", [tensor], wire)
    outputs, sizes = allgather_with(call_scalars(wire.number), [tensor], wire)
    return take_turns(wire, outputs)[0], tf.reshape(sizes, [-1])


def reducescatter(
    tensors: Sequence[tf.Tensor], wire: WireName, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce checked tensors and return this rank's rows; those of one dtype complete together."""
    _check_rows("reducescatter", tensors, wire)
    last = call_scalars(wire.number, reduction.prescale, reduction.postscale)
    operation, op = raw_ops().hvdlite_reducescatter, reduction.op
    outputs = _per_dtype(
        lambda part, wire: operation(part, last, **_attributes(wire), op=op), tensors, wire
    )
    return take_turns(wire, outputs)


def alltoall(tensor: tf.Tensor, splits: tf.Tensor, wire: WireName) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to each rank; return the rows from all, and how many came from each."""
    # `splits` and the second result are int64. Empty splits give each rank the same number of rows.
    _check_rows("alltoall", [tensor], wire)
    output, received = alltoall_with(call_scalars(wire.number), tensor, splits, wire)
    take_turns(wire, [output])
    return output, received


def query(what: str, process_set: int | None = None, name: str | None = None) -> tf.Tensor:
    """Return a property of the world ("rank", "size"...) or of a process set, an int32 scalar.

    A set has "rank" (-1 if this rank is not a member), "size", and "included" (0 or 1).
    """
    if xla.in_xla_context():
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
    if is_nested() and not xla.in_xla_context():
        with tf.control_dependencies(results):
            handle = turn(f"{wire.text}@{wire.process_set}")
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.constant(1, tf.int64))
    return results


# The operations on tensors of one dtype. `last` is the `call_scalars` of the operation; gradients
# use that of the operation whose gradient they are (see `autodiff`).


def allreduce_with(
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


def allgather_with(
    last: tf.Tensor, tensors: Sequence[tf.Tensor], wire: WireName
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Gather tensors; return them and how many rows each rank had, by tensor and rank."""
    outputs, sizes = raw_ops().hvdlite_allgather(tensors, last, **_attributes(wire))
    return outputs, sizes


def alltoall_with(
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


def as_dtypes_of(outputs: Sequence[tf.Tensor], gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return dense gradients of the outputs' dtypes, because all ranks need the same dtype."""
    pairs = zip(gradients, outputs, strict=False)
    return [tf.cast(tf.convert_to_tensor(one), output.dtype) for one, output in pairs]


def check_differentiable(name: str, op: int, verb: str = "allreduce") -> None:
    """Raise an ArgumentError unless `op`, an average or a sum, has a gradient."""
    if op not in (ops.Average, ops.Sum):
        raise ArgumentError(
            f"{verb} '{name}' with op=hvd.{ops.op_name(op)} has no gradient; "
            "use hvd.Average or hvd.Sum, or tf.stop_gradient() on the input"
        )


def _refuse_xla(verb: str, name: str) -> None:
    if xla.in_xla_context():
        raise ArgumentError(f"{verb} '{name}' cannot be compiled by XLA; use jit_compile=False")


def _check_rows(verb: str, tensors: Sequence[tf.Tensor], wire: WireName) -> None:
    for tensor, name in zip(tensors, wire.names, strict=True):
        _refuse_xla(verb, name)
        if tensor.shape.rank == 0:
            raise ArgumentError(f"{verb} '{name}' of a scalar; use tf.reshape(tensor, [1])")
