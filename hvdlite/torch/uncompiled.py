"""Functions that torch never compiles. To import this module imports Dynamo (a second)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def disabled(function: _Function, does: str) -> _Function:
    """Return a function that torch calls without compiling it, and tell `fullgraph=True` why."""
    why = {"reason": f"hvdlite {does} outside of graphs; leave fullgraph=True out"}
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        why = {}  # Older releases take no reason.
    return torch.compiler.disable(function, **why)


def _call(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return function(*given, **named)


call = disabled(_call, "communicates")
