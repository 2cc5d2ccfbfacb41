"""What the distributed optimizers of all frameworks share.

That is: the checks of their options, the subclass that makes one of a framework's optimizer, and
`--check-finite`, which names the rank that has a NaN or an infinity in its own gradients.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdlite import _core, basics
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.ops import Adasum, Average, Sum, reduce_op


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


def local_layer_variables(layers: Any) -> list[Any]:
    """List the trainable variables of one Keras layer, or of several; none for None."""
    if layers is None:
        return []
    if not isinstance(layers, list | tuple | set):
        layers = [layers]
    for layer in layers:
        if not getattr(layer, "built", False):
            raise ArgumentError(
                f"the local layer {getattr(layer, 'name', layer)!r} has no weights yet; build the "
                "model first"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]


def subclass_in_place(thing: Any, mixin: type) -> None:
    """Put a mixin before the class of an object; `super()` in it leads to the old class."""
    # The new class has the name of the old one, which the object keeps as `_wrapped_class`.
    wrapped_class: Any = type(thing)
    become(thing, _mixed_class(mixin, wrapped_class))


def become(thing: Any, its_class: type) -> None:
    """Change the class of an object, also where its class makes `__class__` a property."""
    object.__dict__["__class__"].__set__(thing, its_class)


@functools.cache
def _mixed_class(mixin: type, wrapped_class: Any) -> type:
    return type(
        wrapped_class.__name__,
        (mixin, wrapped_class),
        {
            "__doc__": wrapped_class.__doc__,
            "__module__": wrapped_class.__module__,
            "__qualname__": wrapped_class.__qualname__,
            "_wrapped_class": wrapped_class,
        },
    )


# An owner has the number of its present step, and that of the last one that was not finite.
_finite_steps: defaultdict[str, list[int]] = defaultdict(lambda: [0, -1])


def finite_level() -> int:
    """Return HVDLITE_CHECK_FINITE: 0 looks at nothing, 1 raises an error, 2 warns."""
    if basics.is_initialized():
        return basics.current_world().check_finite
    return int(_core.knob_values()["check_finite"])  # A graph may be traced before init().


def check_finite(
    owner: str,
    finite: Iterable[tuple[str, bool]],
    step: int = 0,
    received: Callable[[], bool] = lambda: False,
) -> None:
    """Raise or warn if a gradient of a name, before its reduction, is not finite."""
    # Without `step` each call is a step. Of bad steps in a row only the first one warns. `received`
    # says whether parameters are not finite: then an earlier step has brought it, and nobody warns.
    steps = _finite_steps[owner]
    steps[0] = step or steps[0] + 1
    bad = next((name for name, is_finite in finite if not is_finite), None)
    if bad is None:
        return
    goes_on, steps[1] = steps[0] <= steps[1] + 1, steps[0]
    text = f"rank {basics.rank()}: '{bad}' has a NaN or an infinity in step {steps[0]}"
    if received():
        if finite_level() != 1:
            return
        text += ", and so have its parameters: an earlier step or a checkpoint has brought it"
    basics.engine().note("nonfinite", bad, text)
    if finite_level() == 1:
        raise HvdliteError(text)
    if not goes_on:
        print(f"hvdlite [{basics.rank()}] warning: {text}", file=sys.stderr, flush=True)
