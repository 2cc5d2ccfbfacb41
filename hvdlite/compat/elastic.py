"""`horovod.common.elastic`: the states, and `run_fn`, from which Horovod's adapters make `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run_fn"]


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Make a training function elastic; `reset` is not called: hvdlite connects the ranks again."""
    return run(func)
