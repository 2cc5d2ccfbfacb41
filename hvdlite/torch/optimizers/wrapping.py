"""The mixin that makes an optimizer a distributed one in place; see `hvdlite.subclass`."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdlite.errors import ArgumentError


class Wrapping(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of the classes that are put before the class of the user's optimizer."""

    # A pickle contains a plain optimizer of the wrapped class, so that it can be loaded without
    # hvdlite.

    _wrapped_class: Any

    def _plain_copy(self, memo: dict[int, Any]) -> Any:
        """Copy deeply, as an optimizer of the wrapped class; `memo` then has its parameters."""
        plain = _plain(_plain_class(type(self)))
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain

    def __copy__(self) -> Any:
        raise ArgumentError(
            f"copy.copy() of a distributed {_plain_class(type(self)).__name__} would step the same "
            "parameters, and reduce no gradients; use copy.deepcopy((model, optimizer))"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (_plain_class(type(self)),), self.__getstate__()


def _plain_class(kind: Any) -> Any:
    """Return the class of the user's optimizer below all wrappings."""
    while issubclass(kind, Wrapping):
        kind = kind._wrapped_class
    return kind


def _plain(wrapped_class: Any) -> Any:
    return wrapped_class.__new__(wrapped_class)


def own_step(step: Any) -> Any:
    """Mark a wrapping's `step` as torch marks a `step` that torch has wrapped."""
    # Torch wraps `step` to run its hooks, which the wrapped class's own step does, and to notice
    # schedulers that step too early.
    step.hooked = step._wrapped_by_lr_sched = step._with_counter = True
    return step


def take_step_back(optimizer: Any) -> None:
    """Remove the `step` by which a scheduler notices calls; raise if `step` is something else."""
    step = vars(optimizer).pop("step", None)
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ArgumentError(
            f"step() of this {type(optimizer).__name__} was replaced by {step!r}; "
            "make it a DistributedOptimizer before that"
        )
