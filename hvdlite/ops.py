"""Reduce operations, element types, and the argument checks that all adapters share.

Example:
    >>> from hvdlite import ops
    >>> ops.choose_op(average=None, op=None) == ops.Average
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

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
    """Return the name by which users write a reduce operation: "Average", "Sum"..."""
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


def check_gradient_op(op: int, predivide_factor: float = 1.0) -> None:
    """Raise ArgumentError if `op` cannot combine gradients, or if the factor does not fit it."""
    # An average is divided by the factor before the sum, and by the rest after the sum.
    op = reduce_op(op)
    if op not in (Average, Sum, Adasum):
        raise ArgumentError(
            f"op=hvd.{op.name} makes no gradient; use hvd.Average, hvd.Sum or hvd.Adasum"
        )
    if predivide_factor != 1.0:
        check_mean("gradient_predivide_factor=", op, "it divides an average in two parts")
    if predivide_factor <= 0:
        raise ArgumentError("gradient_predivide_factor is a positive number")


def check_mean(option: str, op: int, why: str) -> None:
    """Raise ArgumentError if an option that needs `Average` is given with another operation."""
    if op != Average:
        raise ArgumentError(
            f"{option} cannot be combined with op=hvd.{reduce_op(op).name}: {why}; use "
            "op=hvd.Average"
        )


def check_weight(weight: Any, op: int) -> None:
    """Raise ArgumentError if gradients have weights and are not averaged."""
    if weight is not None:
        check_mean("weight=", op, "it makes a weighted average")


def check_passes(passes: Any) -> int:
    """Return the number of passes per step, or raise ArgumentError."""
    # A value that equals a whole number, such as 64 / 32, is one, too.
    try:
        number = int(passes)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1 or number != passes:
        raise ArgumentError(
            f"backward_passes_per_step is a whole number of at least 1, not {passes!r}"
        )
    return number


Groups = int | Sequence[Sequence[Any]]  # Gradients travel in so many groups, or in these.


def check_groups(groups: Groups, source: str, none: str) -> Groups:
    """Return the groups in which gradients travel, lists as lists; or raise ArgumentError."""
    # `source` is the user's word for what has a gradient, such as "parameter", and `none` says what
    # happens where the number of groups is zero.
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentError(f"the number of groups is zero ({none}) or more, not {groups}")
        return groups
    lists = [list(group) for group in groups]
    members = [id(one) for group in lists for one in group]
    if len(members) != len(set(members)):
        raise ArgumentError(f"a {source} is in two of the groups, or twice in one")
    return lists


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
