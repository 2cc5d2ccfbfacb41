"""Hooks of a reducer: on the gradients of its parameters, and at the end of a backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
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


def calling(owner: object, method: str) -> Callable[..., None]:
    """Return a function that calls a method of an object as long as the object lives."""
    reference = weakref.ref(owner)

    def call(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            getattr(living, method)(*arguments)

    return call


class WatchedParameters:
    """The parameters of an optimizer's groups, as of the last `update`, each with a hook."""

    def __init__(
        self,
        read_groups: ReadGroups,
        names: Mapping[torch.Tensor, str],
        on_gradient: Callable[[torch.Tensor], None],
    ) -> None:
        # Backward calls `on_gradient` when a parameter's gradient was accumulated. It must not keep
        # the owner of this object alive.
        self.params: list[torch.Tensor] = []  # The order is that of the groups.
        self.names = dict(names)  # All that were ever in the groups have a name.
        self._read_groups = read_groups
        self._on_gradient = on_gradient
        self._hooks: dict[torch.Tensor, Any] = {}
        weakref.finalize(self, _remove_all, self._hooks)

    def update(self, any_at_all: bool, kept: Collection[torch.Tensor] = ()) -> bool:
        """Watch the groups' parameters, or none; return whether they have changed."""
        # Those in `kept` belong to them also where they are frozen.
        params = []
        for number, group in enumerate(self._read_groups() if any_at_all else ()):
            for index, param in enumerate(group["params"]):
                if param not in self.names:
                    self.names[param] = f"parameter.{number}.{index}"
                if param.requires_grad or param in kept:
                    params.append(param)
        known = self.params
        if len(params) == len(known) and all(map(lambda a, b: a is b, params, known)):
            return False
        for param in self._hooks.keys() - set(params):
            self._hooks.pop(param).remove()
        for param in params:
            if param not in self._hooks and param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks[param] = hook
        self.params = params
        return True


def _remove_all(hooks: dict[torch.Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


class BackwardEnd:
    """Calls a function once at the end of each outermost backward in which it was expected."""

    # A backward may run inside another one: a checkpoint with use_reentrant=True starts one. The
    # end of the inner backward does not count, because functions of the outer one are still to run.
    # The request is then passed on to the outer backward.

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
        around = torch._C._current_autograd_node()  # None outside of a backward.
        if around is None:
            self._call()
            return
        handles: list[Any] = []

        def expect(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            self.expect()

        for node, _ in around.next_functions:
            if node is not None:
                handles.append(node.register_prehook(expect))
