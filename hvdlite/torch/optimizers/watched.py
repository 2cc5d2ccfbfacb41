"""The parameters that a reducer watches: those of the optimizer's groups, each with a hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

ReadGroups = Callable[[], list[dict[str, Any]]]


def reader_of(optimizer: Any) -> ReadGroups:
    """Return a function that reads an optimizer's groups without a wait for gradients.

    It does not keep the optimizer alive, and reads no groups once that is gone.
    """
    reference = weakref.ref(optimizer)

    def read() -> list[dict[str, Any]]:
        living = reference()
        groups: list[dict[str, Any]] = [] if living is None else vars(living)["param_groups"]
        return groups

    return read


class WatchedParameters:
    """Follows the parameter groups of an optimizer, whenever `update` is called.

    Attributes:
        read_groups: returns the optimizer's param_groups.
        params: the parameters that are trained, in the order of the groups.
        names: the names of all that were ever watched.
    """

    def __init__(
        self,
        read_groups: ReadGroups,
        names: Mapping[torch.Tensor, str],
        on_gradient: Callable[[torch.Tensor], None],
        skipped: Container[torch.Tensor] = (),
    ) -> None:
        """Watch nothing yet.

        Args:
            read_groups: returns the optimizer's param_groups.
            names: the names of the parameters, as far as known.
            on_gradient: called in backward when the gradient of a parameter was accumulated; it
                must not keep the owner of this object alive.
            skipped: parameters that are not watched, whatever the groups have.
        """
        self.params: list[torch.Tensor] = []
        self.names = dict(names)
        self.read_groups = read_groups
        self._on_gradient = on_gradient
        self._skipped = skipped
        self._hooks: dict[torch.Tensor, Any] = {}
        weakref.finalize(self, _remove_all, self._hooks)

    def contains_any(self, params: set[torch.Tensor]) -> bool:
        """Return whether it watches one of these parameters."""
        return not params.isdisjoint(self._hooks)

    def in_groups(self) -> set[torch.Tensor]:
        """Return all parameters of the groups, also those that are not trained."""
        return {param for group in self.read_groups() for param in group["params"]}

    def update(self, any_at_all: bool) -> bool:
        """Watch the parameters that the groups have now; return whether they are other ones.

        Args:
            any_at_all: False: watch nothing.
        """
        params = []
        for number, group in enumerate(self.read_groups() if any_at_all else ()):
            for index, param in enumerate(group["params"]):
                if param.requires_grad and param not in self._skipped:
                    params.append(param)
                    if param not in self.names:
                        self.names[param] = f"parameter.{number}.{index}"
        known = self.params
        if len(params) == len(known) and all(map(lambda a, b: a is b, params, known)):
            return False
        for param in self._hooks.keys() - set(params):
            self._hooks.pop(param).remove()
        for param in params:
            if param not in self._hooks:
                hook = param.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks[param] = hook
        self.params = params
        return True

    def forget_order(self) -> None:
        """Make the next `update` find other parameters, whatever the groups have."""
        self.params = []


def _remove_all(hooks: dict[torch.Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
