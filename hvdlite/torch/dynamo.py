"""Hooks of gradients, and the end of a backward, also where torch compiles the backward.

With compiled autograd no engine runs the nodes of a backward: Dynamo traces all of them and their
hooks. It cannot trace a hook that reaches the core, and what a hook queues for the end of the
backward is never called. So the hooks run outside of the graph, and the function that torch makes
for a compiled backward is extended: at its end it calls what was queued in it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Call = Callable[[], None]

_here = threading.local()  # `queued` has the calls at the end of this thread's compiled backward.


def _queued() -> list[Call] | None:
    return getattr(_here, "queued", None)


def queue(call: Call) -> None:
    """Call a function at the end of the running backward, after those queued before."""
    queued = _queued()
    if queued is not None:
        queued.append(call)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that a compiled backward calls, and does not look into."""
    _follow()
    outside = disabled(hook, "sends gradients")

    def call(*arguments: Any) -> None:
        # To go around Dynamo takes longer than most hooks, so an ordinary backward does not.
        if compiling() or _queued() is not None:
            outside(*arguments)
        else:
            hook(*arguments)

    return call


@functools.cache
def _follow() -> None:
    """Let the backwards that torch will compile call at their end what is queued in them."""
    try:
        from torch._dynamo.compiled_autograd import AutogradCompilerInstance as Compiler
    except ImportError:
        # Where torch has no such place, gradients are reduced in `step`.
        return
    capture = getattr(Compiler, "end_capture", None)
    if capture is None:
        return

    @functools.wraps(capture)
    def end_capture(self: Any, *given: Any, **named: Any) -> Any:
        made = capture(self, *given, **named)
        return (_with_end(made[0]), *made[1:]) if isinstance(made, tuple) else made

    Compiler.end_capture = end_capture


def _with_end(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs a compiled backward, extended by the calls at its end."""

    def call(*given: Any, **named: Any) -> Any:
        around, _here.queued = _queued(), []
        try:
            results = run(*given, **named)
            for one in _here.queued:  # A call may queue more.
                one()
        finally:
            _here.queued = around
        return results

    return torch.compiler.disable(call)  # type: ignore[no-any-return]


Function = TypeVar("Function", bound=Callable[..., object])

_TELLS = hasattr(torch.compiler, "is_compiling")  # torch 2.1 does not.


def compiling() -> bool:
    """Return whether Dynamo follows this call; False if torch does not tell."""
    # Dynamo knows the function of torch by this name alone.
    return _TELLS and torch.compiler.is_compiling()


def disabled(function: Function, does: str) -> Function:
    """Return a function that torch calls without compiling it, and tell `fullgraph=True` why."""
    why = {"reason": f"hvdlite {does} outside of graphs; leave fullgraph=True out"}
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        why = {}  # Older releases take no reason.
    return torch.compiler.disable(function, **why)  # type: ignore[no-any-return]


def outside_graphs(function: Function) -> Function:
    """Decorate a function that a compiled graph leaves before the call, and begins anew after."""

    @functools.wraps(function)
    def entry(*given: object, **named: object) -> object:
        if compiling():
            return call_outside(function, *given, **named)
        return function(*given, **named)

    return entry  # type: ignore[return-value]


def call_outside(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function outside of the graph that is being compiled."""
    # Dynamo, which this needs, takes a second to import, and is there by now.
    from hvdlite.torch.untraced import call

    return call(function, *given, **named)
