"""Makes an optimizer a distributed one in place, as an instance of a subclass of its class.

It stays the same object, so that schedulers that refer to it still work.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from hvdlite.errors import ArgumentError


class Wrapping(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of the classes that are put before the class of the user's optimizer.

    A pickle contains a plain optimizer of the wrapped class, so that it can be loaded without
    hvdlite.
    """

    _wrapped_class: Any

    def _plain_copy(self, memo: dict[int, Any]) -> Any:
        """Copy deeply, as an optimizer of the wrapped class; `memo` then has its parameters."""
        plain = _plain(self._wrapped_class)
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (self._wrapped_class,), self.__getstate__()


def _plain(wrapped_class: Any) -> Any:
    return wrapped_class.__new__(wrapped_class)


def own_step(step: Any) -> Any:
    """Mark a wrapping's `step` as torch marks a `step` that torch has wrapped.

    Torch wraps `step` to run its hooks, which the wrapped class's own step does, and to notice
    schedulers that step too early.
    """
    step.hooked = step._wrapped_by_lr_sched = step._with_counter = True
    return step


def take_step_back(optimizer: Any) -> None:
    """Remove the `step` that a scheduler has set on the object to notice calls.

    Raises:
        ArgumentError: `step` was replaced by something else.
    """
    step = vars(optimizer).pop("step", None)
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ArgumentError(
            f"step() of this {type(optimizer).__name__} was replaced by {step!r}; "
            "make it a DistributedOptimizer before that"
        )


def wrap(optimizer: Any, wrapping: Any) -> None:
    """Put a wrapping, whose `step` is an `own_step`, before the class of an optimizer."""
    wrapped_class: Any = type(optimizer)
    optimizer.__class__ = _class_of(wrapping, wrapped_class)


@functools.cache
def _class_of(wrapping: Any, wrapped_class: Any) -> type[Wrapping]:
    return type(
        wrapped_class.__name__,
        (wrapping, wrapped_class),
        {
            "__doc__": wrapped_class.__doc__,
            "__module__": wrapped_class.__module__,
            "__qualname__": wrapped_class.__qualname__,
            "_wrapped_class": wrapped_class,
        },
    )
