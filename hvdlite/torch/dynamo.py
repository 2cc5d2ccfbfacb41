"""What torch.compile asks for: calls at which a graph breaks, and hooks in compiled backwards.

Dynamo looks into none of hvdlite's own code, which some releases of torch cannot compile.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Call = Callable[[], None]
_Function = TypeVar("_Function", bound=Callable[..., object])

_TELLS = hasattr(torch.compiler, "is_compiling")  # torch 2.1 does not.


def compiling() -> bool:
    """Return whether Dynamo follows this call."""
    # Dynamo knows the functions of torch by these names alone.
    return torch.compiler.is_compiling() if _TELLS else torch._utils.is_compiling()


def outside_graphs(function: _Function) -> _Function:
    """Decorate a function that a compiled graph leaves before the call, and begins anew after."""

    @functools.wraps(function)
    def entry(*given: object, **named: object) -> object:
        if compiling():
            return call_outside(function, *given, **named)
        return function(*given, **named)

    return entry  # type: ignore[return-value]


def call_outside(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    # Dynamo runs an import, and does not trace it.
    from hvdlite.torch.uncompiled import call

    return call(function, *given, **named)


def keep_out(function: _Function) -> _Function:
    """Decorate a function that torch's C++ code calls while a compiled function runs."""
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "_FrameExecStrategy"):
        strategy = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        dynamo.set_code_exec_strategy(function.__code__, strategy)
        return function

    # Torch 2.7 and older cannot be told so of a function and all that it calls.
    def without_compiler(*given: object, **named: object) -> object:
        compiler = dynamo.set_eval_frame(None)
        try:
            return function(*given, **named)
        finally:
            dynamo.set_eval_frame(compiler)

    if hasattr(dynamo, "skip_code"):
        dynamo.skip_code(without_compiler.__code__)
    return functools.update_wrapper(without_compiler, function)  # type: ignore[return-value]


# With compiled autograd no engine runs the nodes of a backward: Dynamo traces all of them and their
# hooks. It cannot trace a hook that reaches the core, and what a hook queues for the end of the
# backward is never called. So the hooks run outside of the graph, and the function that torch makes
# for a compiled backward is extended: at its end it calls what was queued in it.

_here = threading.local()  # `queued` has the calls at the end of this thread's compiled backward.


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that a compiled backward calls, and does not look into."""
    from hvdlite.torch.uncompiled import disabled

    _extend_compiled_backwards()
    outside = disabled(hook, "sends gradients")

    def call(*arguments: Any) -> None:
        # To go around Dynamo takes longer than most hooks, so an ordinary backward does not.
        if compiling() or _queued() is not None:
            outside(*arguments)
        else:
            hook(*arguments)

    return call


def queue(call: _Call) -> None:
    """Call a function at the end of the running backward, after those queued before."""
    queued = _queued()
    if queued is not None:
        queued.append(call)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def _queued() -> list[_Call] | None:
    return getattr(_here, "queued", None)


@functools.cache
def _extend_compiled_backwards() -> None:
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

    return torch.compiler.disable(call)
