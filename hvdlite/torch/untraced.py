"""A call that torch does not compile. To import this module imports Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.torch.dynamo import disabled


def _call(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return function(*given, **named)


call = disabled(_call, "communicates")
