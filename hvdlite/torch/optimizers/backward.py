"""Calls a function at the end of a backward, at the request of a hook inside of it.

A backward may run inside another one: a checkpoint with use_reentrant=True starts one. The end of
the inner backward does not count, because functions of the outer one are still to run. The request
is then passed on to the outer backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvdlite.torch.collectives.compiled_backward import queue


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
