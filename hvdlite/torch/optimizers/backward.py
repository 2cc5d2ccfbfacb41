"""The end of a backward: autograd calls there what was asked for from inside of it.

A backward that runs inside of another, as a checkpoint with use_reentrant=True starts one, is part
of that, and its end is not the end. What was asked for is passed on to the backward around it, in
which the functions that follow the checkpoint are still to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class BackwardEnd:
    """Calls a function once at the end of each outermost backward in which it was expected."""

    def __init__(self, call: Callable[[], None]) -> None:
        """Prepare it.

        Args:
            call: takes place in the thread that ends the backward; what it raises, backward()
                raises.
        """
        self._call = call
        self._expected: set[int] = set()  # numbers of backwards under way

    def expect(self) -> None:
        """Ask for the call; from a hook. Outside of a backward that autograd runs: do nothing."""
        number = torch._C._current_graph_task_id()
        if number == -1 or number in self._expected:
            return
        queue(lambda: self._at_end(number))
        self._expected.add(number)

    def forget(self) -> None:
        """Forget backwards that never came to their ends, because something in them raised."""
        self._expected.clear()

    def _at_end(self, number: int) -> None:
        self._expected.discard(number)
        around = _current_node()
        if around is None:
            self._call()
        else:
            self._pass_on(around)

    def _pass_on(self, around: Any) -> None:
        """Expect the end of the backward in which a node runs that started this one."""
        handles: list[Any] = []

        def expect(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            self.expect()

        for node, _ in around.next_functions:
            if node is not None:
                handles.append(node.register_prehook(expect))


def queue(call: Callable[[], None]) -> None:
    """Have a function called at the end of the backward that runs, after those queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _current_node() -> Any:
    """Give the node that autograd evaluates in this thread; None outside of all."""
    return torch._C._current_autograd_node()
