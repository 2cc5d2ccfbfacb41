"""What makes an optimizer one of hvdlite, in place: `wrap`, and the base of mixins."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from hvdlite.errors import ArgumentError
from hvdlite.optimizers import subclass_in_place
from hvdlite.process_sets import ProcessSet


class Wrapping(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of the classes that are put before the class of the user's optimizer."""

    # A pickle contains a plain optimizer of the wrapped class, so that it can be loaded without
    # hvdlite.

    _wrapped_class: Any
    _made_as: tuple[str, ProcessSet]  # What messages call it, and the ranks for which it is one.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ArgumentError: another optimizer of hvdlite has one of them.
        """
        super().add_param_group(param_group)
        groups = self.__dict__["param_groups"]
        title, process_set = self._made_as
        try:
            _refuse_second(self, title, process_set, {}, groups[-1:])
        except ArgumentError:
            groups.pop()
            raise

    def _grouped_parameters(self) -> list[torch.Tensor]:
        return [param for group in vars(self)["param_groups"] for param in group["params"]]

    def _go_on(self) -> None:
        """Drop gradients that no step has used, at a boundary of an elastic job."""

    def __copy__(self, memo: Any = None) -> NoReturn:
        raise ArgumentError(
            f"a copy of a distributed {type(self).__name__} would reduce no gradients; copy the "
            "model, make the optimizer of the copy a distributed one, and give it the state_dict() "
            "of this one"
        )

    __deepcopy__ = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind: Any = type(self)
        while issubclass(kind, Wrapping):
            kind = kind._wrapped_class
        return _plain, (kind,), self.__getstate__()


def _plain(wrapped_class: Any) -> Any:
    return wrapped_class.__new__(wrapped_class)


# It has all living optimizers of hvdlite, by their id.
_made: weakref.WeakValueDictionary[int, Wrapping] = weakref.WeakValueDictionary()


def wrap(
    optimizer: Any,
    mixin: type[Wrapping],
    title: str,
    process_set: ProcessSet,
    names: Mapping[torch.Tensor, str],
) -> None:
    """Put a mixin before the class of an optimizer, or raise; messages call it by the title."""
    # It also removes the `step` by which a scheduler notices calls.
    own = vars(optimizer)
    _refuse_second(optimizer, title, process_set, names, own["param_groups"])
    step = own.pop("step", None)
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ArgumentError(
            f"step() of this {type(optimizer).__name__} was replaced by {step!r}; "
            "make it a DistributedOptimizer before that"
        )
    subclass_in_place(optimizer, mixin)
    optimizer._made_as = title, process_set
    _made[id(optimizer)] = optimizer


def _refuse_second(
    optimizer: Any,
    title: str,
    process_set: ProcessSet,
    names: Mapping[torch.Tensor, str],
    groups: Iterable[dict[str, Any]],
) -> None:
    """Raise if another living optimizer of hvdlite has one of these parameters on this rank."""
    # Both would reduce a gradient: one would write it while the other reads it.
    params = {param for group in groups for param in group["params"]}
    if not process_set.included() or _shared(optimizer, params, names) is None:
        return
    gc.collect()  # The other one may be no longer used.
    shared = _shared(optimizer, params, names)
    if shared is not None:
        raise ArgumentError(
            f"{title} and {shared[0]}, which was made before it, would both reduce the gradient of "
            f"{shared[1]}: delete the earlier one first, and what holds it, such as its scheduler, "
            "or give each optimizer its own parameters"
        )


def _shared(
    optimizer: Any, params: set[torch.Tensor], names: Mapping[torch.Tensor, str]
) -> tuple[str, str] | None:
    """Return what another optimizer is called, and a parameter that it has, too; None if none."""
    # These are texts: a traceback must not keep the other optimizer alive.
    for other in list(_made.values()):
        title, process_set = other._made_as
        if other is optimizer or not process_set.included():
            continue
        for param in other._grouped_parameters():
            if param in params:
                known = {**getattr(other, "_parameter_names", {}), **names}
                return title, known.get(param, f"a parameter of shape {tuple(param.shape)}")
    return None


def refuse_evaluating(optimizer: Any, what: str, remedy: str) -> None:
    """Raise if an optimizer changes parameters outside of its step, as schedule-free ones do."""
    # Their eval() and train() compute parameters from their state.
    if callable(getattr(optimizer, "eval", None)):
        raise ArgumentError(
            f"{what} cannot be combined with {type(optimizer).__name__}: its eval() and train() "
            f"change the parameters by its state, which is another one on each rank; {remedy}"
        )


def own_step(step: Any) -> Any:
    """Mark a wrapping's `step` as torch marks a `step` that torch has wrapped."""
    # Torch wraps `step` to run its hooks, which the wrapped class's own step does, and to notice
    # schedulers that step too early.
    step.hooked = step._wrapped_by_lr_sched = step._with_counter = True
    return step
