"""Calls at which a compiled graph breaks, so that Dynamo looks into none of hvdlite's own code.

Dynamo would follow a call to the core, break the graph there, and compile what comes before and
after it: code that gains nothing by it, and that some releases of torch cannot compile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

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
    from hvdlite.torch.collectives.untraced import call

    return call(function, *given, **named)
