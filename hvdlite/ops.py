"""What all adapters say about a collective: operation, element type, compression and name."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any

from hvdlite import _core
from hvdlite._core import DTYPES, REDUCE_OPS, REDUCIBLE
from hvdlite.errors import ArgumentError


class ReduceOp(IntEnum):
    """How a reduction combines the tensors of all ranks. The numbers are Horovod's."""

    Average = REDUCE_OPS["average"]
    Sum = REDUCE_OPS["sum"]
    Adasum = REDUCE_OPS["adasum"]
    Min = REDUCE_OPS["min"]
    Max = REDUCE_OPS["max"]
    Product = REDUCE_OPS["product"]


Average = ReduceOp.Average
"""The mean of all ranks' tensors, elementwise; means of integers are rounded towards zero."""
Sum = ReduceOp.Sum
"""The sum of all ranks' tensors, elementwise."""
Adasum = ReduceOp.Adasum
"""Adaptive summation of gradients (Maleki et al., MLSys 2021); see docs/uneven_data.md."""
Min = ReduceOp.Min
"""The smallest of all ranks' values, elementwise; of bool, whether all are true."""
Max = ReduceOp.Max
"""The largest of all ranks' values, elementwise; of bool, whether any is true."""
Product = ReduceOp.Product
"""The product of all ranks' tensors, elementwise."""

_NUMBERS = tuple(one.value for one in ReduceOp)


def op_name(op: int) -> str:
    return ReduceOp(op).name


def reduce_op(op: object) -> ReduceOp:
    """Return `op`, a `ReduceOp` or the number of one, as a `ReduceOp`; or raise ArgumentError."""
    # Enums of other libraries are refused even if they equal one of the numbers, because other
    # libraries number their operations differently: torch.distributed's SUM is 0, which is
    # `Average` here.
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, int) and not isinstance(op, bool) and op in _NUMBERS:
        return ReduceOp(op)
    known = ", ".join(f"hvd.{one.name}" for one in ReduceOp)
    raise ArgumentError(f"op={op!r} is not a reduce operation of hvdlite; use one of {known}")


def choose_op(average: bool | None, op: int | None) -> ReduceOp:
    """Choose the reduce operation from `op` or the older `average`; the default is `Average`."""
    # In `hvd.allreduce(tensor, hvd.Sum)` the second argument is `average`.
    if average is not None and not isinstance(average, bool):
        raise ArgumentError(
            f"average={average!r}: average, the second argument, takes True, False or None; "
            "write op=... and name=... with their names"
        )
    if op is None:
        return Sum if average is False else Average
    if average is not None:
        raise ArgumentError("give op or average, not both; op=hvd.Average is the default")
    return reduce_op(op)


def dtype_number(dtype: str, name: str = "") -> int:
    """Return the core's number of an element type, such as "float32"; or raise ArgumentError."""
    number = DTYPES.get(dtype)
    if number is not None:
        return number
    subject = f"'{name}': " if name else ""
    raise ArgumentError(
        f"{subject}tensors of dtype {dtype} cannot be sent; convert it to one of "
        f"{', '.join(DTYPES)}"
    )


def check_reducible(dtype: str, name: str, op: int) -> None:
    """Raise ArgumentError if `op` cannot reduce this type; some types can only be copied."""
    if dtype == "bool":
        if op in (Min, Max, Product):
            return
        raise ArgumentError(
            f"'{name}' is bool, which {op_name(op)} does not reduce; convert it, for example to "
            "uint8, or use op=hvd.Max (any) or op=hvd.Min (all)"
        )
    if dtype not in REDUCIBLE:
        raise ArgumentError(
            f"'{name}', of dtype {dtype}, cannot be reduced, only copied; convert it, for example "
            "to float16"
        )


def check_differentiable(verb: str, name: str, op: int) -> None:
    """Refuse the backward of a reduction that has none: `op` is neither `Average` nor `Sum`."""
    if op not in (Average, Sum):
        raise ArgumentError(
            f"{verb} '{name}' with op=hvd.{op_name(op)} has no gradient; use hvd.Average or "
            "hvd.Sum, or cut off the input: detach() or tf.stop_gradient()"
        )


_UINT8 = DTYPES["uint8"]


def gather_bytes(
    engine: _core.Engine,
    data: bytes,
    name: str,
    process_set: int = 0,
    timeout: float | None = None,
) -> tuple[list[memoryview], int]:
    """Send this rank's bytes to all members of a process set; return those of every member."""
    # Bytes may be empty, and may have another length on every rank; a rank that has joined gives an
    # empty block. The second result is the epoch of an elastic job whose ranks sent. `name`
    # identifies the operation on all ranks, and process set 0 is the world. A member that has not
    # submitted within `timeout` seconds causes a TimeoutError; None waits forever.
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    tensor = _core.Tensor(name, _UINT8, [len(data)], address, 0)
    handle = engine.allgather(name, [tensor], process_set, keep=data, blocking=True)
    handle.wait(timeout)
    received = handle.take_output()
    ends = accumulate(handle.first_dimensions, initial=0)
    return [received[begin:end] for begin, end in pairwise(ends)], handle.epoch


def maximum(engine: _core.Engine, name: str, *values: int) -> list[int]:
    """Return the largest values of all ranks, each of 64 bits; `name` identifies the operation."""
    cells = (ctypes.c_int64 * len(values))(*values)
    address = ctypes.addressof(cells)
    tensor = _core.Tensor(name, DTYPES["int64"], [len(values)], address, address)
    engine.allreduce(name, [tensor], Max, keep=cells, blocking=True).wait()
    return list(cells)


class Compressor:
    """Base class of compressors; subclass it and pass the class or an object as `compression=`.

    Ranks reduce the compressed tensor, so a reduction of it must make sense: its dtype and shape
    are the same on every rank, and a compressed zero is a zero.

    A class whose `compress` only casts float32 and float64 to "float16" or "bfloat16" may name that
    dtype in a class attribute `wire`: the core then casts while it copies. A subclass does not
    inherit `wire`, since its `compress` may do more.

    Example:
        >>> class Halving(Compressor):
        ...     @staticmethod
        ...     def compress(tensor):
        ...         return tensor / 2, None
        ...
        ...     @staticmethod
        ...     def decompress(tensor, ctx):
        ...         return tensor * 2
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context that `decompress` receives on this rank.

        Args:
            tensor: this rank's input, of the adapter's framework.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return what the caller receives for the reduced tensor.

        Args:
            tensor: the result, of the shape and dtype that `compress` returned.
            ctx: what `compress` returned besides.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends float32 and float64 as `wire`, everything else as it is."""

    # Each framework has a subclass that says how it casts, and subclasses of that one say to what.

    wide: tuple[Any, ...]  # the framework's float32 and float64
    wire: str

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return a tensor as one of `dtype`: a type of the framework, or the name of one."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype in cls.wide:
            return cls.cast(tensor, cls.wire), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else cls.cast(tensor, ctx)


CAST_TYPES = ("float32", "float64")  # The core can cast these.


def travels_as(cast: int | None, dtype: str) -> int | None:
    """Return the core's number of the dtype as which `dtype` travels; None: as it is."""
    # `cast` is what `cast_in_core` returned.
    return cast if dtype in CAST_TYPES else None


def cast_in_core(compression: Any, op: int) -> tuple[int | None, Any]:
    """Split a compression into the cast that the core does and the compressor left to call."""
    # For a mere cast the result is the core's number of a dtype, for `travels_as`, and a compressor
    # that does nothing; otherwise, and for Adasum, None and the compression itself.
    kind = compression if isinstance(compression, type) else type(compression)
    wire = vars(kind).get("wire")
    if wire is None or op == Adasum:
        return None, compression
    return dtype_number(wire), NoneCompressor


def send_compressed(
    send: Callable[[list[Any]], Sequence[Any]], tensors: Sequence[Any], compression: Any
) -> list[Any]:
    """Compress tensors, pass them to `send`, and decompress the results that `send` returns."""
    packed = [compression.compress(tensor) for tensor in tensors]
    results = send([wire for wire, _ in packed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]


# The names of operations that the user did not name. The coordinator matches the ranks' collectives
# by name. So operations without a name are counted for each process set and kind of operation: the
# third unnamed allreduce of one member of a process set meets the third of every other member,
# whatever else ran in between. Every `init` restarts the counts, since a new world begins. The end
# of `join` restarts them too, because the joined ranks have missed operations; only the numbers of
# `next_object` continue.
#
# In an elastic job a rank that joins has run the script up to `hvd.elastic.run`, and no further. So
# all ranks go back to the counts that they had there (`mark_names`, `return_to_names`) whenever
# ranks may join.

# The keys are a process set, a kind, and whether that is one of objects (optimizers, metrics).
_Counts = dict[tuple[int, str, bool], int]

_counts: _Counts = {}
_name_restarts = 0
_names_lock = threading.RLock()  # It guards both.


def next_name(kind: str, process_set: int = 0) -> str:
    """Return the next name for this kind of operation, such as "#allreduce.0"."""
    # The core does not cache names that start with '#', because each is used once.
    return f"#{kind}.{next_number(kind, process_set)}"


def next_number(kind: str, process_set: int = 0) -> int:
    """Return how many operations of this kind the process set has numbered before."""
    return _next_number(process_set, kind, False)


def next_object(kind: str, process_set: int = 0) -> int:
    """Return how many objects of this kind (optimizers, metrics) the process set has numbered."""
    # An object keeps its number, and names all of its operations by it. So these numbers continue
    # after `join`.
    return _next_number(process_set, kind, True)


def _next_number(*key: Any) -> int:
    with _names_lock:
        number = _counts.get(key, 0)
        _counts[key] = number + 1
    return number


def forget_names(process_set: int) -> None:
    with _names_lock:
        for key in [key for key in _counts if key[0] == process_set]:
            del _counts[key]


def restart_operation_names() -> None:
    """Count operations from zero again, so that ranks that missed some have equal counts."""
    with _names_lock:
        return_to_names({key: count for key, count in _counts.items() if key[2]})


def mark_names() -> _Counts:
    with _names_lock:
        return dict(_counts)


def return_to_names(mark: _Counts) -> None:
    """Go on counting from a mark, so that ranks that did not come further have equal counts."""
    global _name_restarts
    with _names_lock:
        _name_restarts += 1
        _counts.clear()
        _counts.update(mark)


def name_restarts() -> int:
    """Return how often the counts restarted: after each restart the ranks must agree again."""
    return _name_restarts
