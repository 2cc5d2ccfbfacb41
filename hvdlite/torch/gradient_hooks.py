"""The parameters that a reducer watches: those of the optimizer's groups, each with a hook."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvdlite.torch.dynamo import queue

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


class BackwardEnd:
    """Calls a function once at the end of each outermost backward in which it was expected."""

    def __init__(self, call: Callable[[], None]) -> None:
        """Keep `call` for the thread that ends the backward; backward() raises its exceptions."""
        self._call = call
        self._expected: set[int] = set()  # These numbers of backwards will call it.
        self._thread = threading.get_ident()  # The thread that trains has made this object.

    def outside(self) -> bool:
        """Return whether the training thread is calling, outside of backward."""
        in_backward = torch._C._current_graph_task_id() != -1
        return not in_backward and threading.get_ident() == self._thread

    def expect(self) -> None:
        """Request the call, from a hook. Outside of a backward that autograd runs, do nothing."""
        number = torch._C._current_graph_task_id()
        if number == -1 or number in self._expected:
            return
        queue(lambda: self._at_end(number))
        self._expected.add(number)

    def forget(self) -> None:
        """Forget backwards that never reached their end because an exception was raised."""
        self._expected.clear()

    def _at_end(self, number: int) -> None:
        self._expected.discard(number)
        around = _current_node()
        if around is None:
            self._call()
        else:
            self._pass_on(around)

    def _pass_on(self, around: Any) -> None:
        """Request the call at the end of the outer backward; `around` is its node that runs."""
        handles: list[Any] = []

        def expect(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            self.expect()

        for node, _ in around.next_functions:
            if node is not None:
                handles.append(node.register_prehook(expect))


def _current_node() -> Any:
    """Return the node that autograd evaluates in this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def calling(owner: object, method: str) -> Callable[..., None]:
    """Return a function that calls a method of an object as long as the object lives."""
    reference = weakref.ref(owner)

    def call(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            getattr(living, method)(*arguments)

    return call
