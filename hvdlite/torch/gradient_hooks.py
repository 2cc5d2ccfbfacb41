"""The parameters that a reducer watches: those of the optimizer's groups, each with a hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

ReadGroups = Callable[[], list[dict[str, Any]]]


def reader_of(optimizer: Any) -> ReadGroups:
    """Return a function that reads an optimizer's groups without a wait for gradients."""
    # It does not keep the optimizer alive, and reads no groups once that is gone.
    reference = weakref.ref(optimizer)

    def read() -> list[dict[str, Any]]:
        living = reference()
        groups: list[dict[str, Any]] = [] if living is None else vars(living)["param_groups"]
        return groups

    return read


class WatchedParameters:
    """Follows the parameter groups of an optimizer, whenever `update` is called."""

    def __init__(
        self,
        read_groups: ReadGroups,
        names: Mapping[torch.Tensor, str],
        on_gradient: Callable[[torch.Tensor], None],
    ) -> None:
        """Watch nothing yet."""
        # Backward calls `on_gradient` when a parameter's gradient was accumulated. It must not keep
        # the owner of this object alive.
        self.params: list[torch.Tensor] = []  # The order is that of the groups.
        self.names = dict(names)  # All that were ever watched have a name.
        self.read_groups = read_groups
        self._on_gradient = on_gradient
        self._hooks: dict[torch.Tensor, Any] = {}
        weakref.finalize(self, _remove_all, self._hooks)

    def update(self, any_at_all: bool, keeps_frozen: bool = False) -> bool:
        """Watch the groups' parameters, or none; return whether they have changed."""
        # With `keeps_frozen` those that were frozen since the last call may still have gradients.
        kept = set(self.params) if keeps_frozen else ()
        params = []
        for number, group in enumerate(self.read_groups() if any_at_all else ()):
            for index, param in enumerate(group["params"]):
                if param.requires_grad or param in kept:
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
