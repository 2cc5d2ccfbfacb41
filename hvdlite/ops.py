"""What the collectives of every adapter share: reduce operations, element types, checks.

Example:
    >>> from hvdlite import ops
    >>> ops.choose_op(average=None, op=None) == ops.Average
    True
"""

from __future__ import annotations

from hvdlite._core import DTYPES, REDUCE_OPS, REDUCIBLE
from hvdlite.errors import ArgumentError

Average = REDUCE_OPS["average"]
Sum = REDUCE_OPS["sum"]
Adasum = REDUCE_OPS["adasum"]
Min = REDUCE_OPS["min"]
Max = REDUCE_OPS["max"]
Product = REDUCE_OPS["product"]

_NAMES = {number: name.capitalize() for name, number in REDUCE_OPS.items()}


def op_name(op: int) -> str:
    """Return how users write a reduce operation: "Average", "Sum"..."""
    return _NAMES.get(op, str(op))


def choose_op(average: bool | None, op: int | None) -> int:
    """Settle between `op` and the older `average`; without either it is `Average`.

    Args:
        average: True for `Average`, False for `Sum`, None to leave it to `op`.
        op: one of `Average`, `Sum`, `Adasum`, `Min`, `Max`, `Product`, or None.

    Raises:
        ArgumentError: both are given, or `op` is no reduce operation.
    """
    if op is None:
        return Sum if average is False else Average
    if average is not None:
        raise ArgumentError("give op or average, not both; op=hvd.Average is the default")
    if op not in _NAMES:
        known = ", ".join(f"hvd.{name}" for name in _NAMES.values())
        raise ArgumentError(f"op={op!r} is no reduce operation; use one of {known}")
    return op


def check_gradient_op(op: int, predivide_factor: float = 1.0) -> None:
    """Refuse what makes no gradient of the ranks' gradients.

    Raises:
        ArgumentError: `op` is none of `Average`, `Sum` and `Adasum`, or the factor, by which an
            average is divided before the sum rather than after it, is no positive number.
    """
    if op not in (Average, Sum, Adasum):
        raise ArgumentError(
            f"op=hvd.{op_name(op)} makes no gradient; use hvd.Average, hvd.Sum or hvd.Adasum"
        )
    if predivide_factor != 1.0 and op != Average:
        raise ArgumentError("gradient_predivide_factor goes with op=hvd.Average")
    if predivide_factor <= 0:
        raise ArgumentError("gradient_predivide_factor is a positive number")


def check_passes(passes: int) -> None:
    """Refuse what is no number of passes per step.

    Raises:
        ArgumentError: `backward_passes_per_step` is no whole number of at least 1.
    """
    if not isinstance(passes, int) or passes < 1:
        raise ArgumentError("backward_passes_per_step is a whole number of at least 1")


def dtype_number(dtype: str, name: str = "") -> int:
    """Return the core's number of an element type, of the tensor of that name.

    Raises:
        ArgumentError: the core has no such type; the message says what to send instead.
    """
    number = DTYPES.get(dtype)
    if number is not None:
        return number
    subject = f"'{name}': " if name else ""
    raise ArgumentError(
        f"{subject}tensors of dtype {dtype} cannot be sent; convert it to one of "
        f"{', '.join(DTYPES)}"
    )


def check_reducible(dtype: str, name: str) -> None:
    """Refuse to reduce what can be copied only.

    Raises:
        ArgumentError: `dtype` has no arithmetic here; the message says what to do.
    """
    if dtype == "bool":
        raise ArgumentError(
            f"'{name}' is bool, which no operation reduces; convert it to uint8 and use op=hvd.Max "
            "(any) or op=hvd.Min (all)"
        )
    if dtype not in REDUCIBLE:
        raise ArgumentError(
            f"'{name}', of dtype {dtype}, cannot be reduced, only copied; convert it, for example "
            "to float16"
        )
