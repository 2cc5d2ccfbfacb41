"""What is put before the class of an optimizer to make it a distributed one; see `subclass`."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdlite.errors import ArgumentError


class Wrapping(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of what is put before the class of the optimizer that users give.

    A pickle holds a plain optimizer of the wrapped class, so that it can be loaded where there is
    no hvdlite.
    """

    _wrapped_class: Any

    def _plain_copy(self, memo: dict[int, Any]) -> Any:
        """Copy deeply, as an optimizer of the wrapped class; `memo` leads to its parameters."""
        plain = _plain(self._wrapped_class)
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (self._wrapped_class,), self.__getstate__()


def _plain(wrapped_class: Any) -> Any:
    return wrapped_class.__new__(wrapped_class)


def own_step(step: Any) -> Any:
    """Mark a wrapping's `step` as torch marks those that it has wrapped.

    That is to run the hooks of a step, which the wrapped class's own step does, and to see whether
    schedulers step too early.
    """
    step.hooked = step._wrapped_by_lr_sched = step._with_counter = True
    return step


def take_step_back(optimizer: Any) -> None:
    """Undo that a scheduler replaced `step` on the object, to see whether it is called.

    Raises:
        ArgumentError: somebody else replaced it.
    """
    step = vars(optimizer).pop("step", None)
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ArgumentError(
            f"step() of this {type(optimizer).__name__} was replaced by {step!r}; "
            "make it a DistributedOptimizer before that"
        )
