"""Ends the engines of process groups, also where a script forgets to.

At the exit of the interpreter all engines are shut down, and the thread that completes futures
ends. When an exception ends the script, the other members get its text, as after `hvd.init()`.
"""

from __future__ import annotations

import atexit
import threading
from types import TracebackType

from hvdlite import _core
from hvdlite.basics import describe_error, tell_also
from hvdlite.torch.distributed.work import stop_waiter

_lock = threading.Lock()
# These engines are open; the values are this process's ranks.
_engines: dict[_core.Engine, int] = {}
_hooks_installed = False


def enter(engine: _core.Engine, rank: int) -> None:
    """Take note of an engine that has to be ended."""
    global _hooks_installed
    with _lock:
        _engines[engine] = rank
        if not _hooks_installed:
            _hooks_installed = True
            atexit.register(_end_all)
            tell_also(_tell_peers)


def end(engine: _core.Engine) -> None:
    """Leave a group cleanly; does nothing the second time."""
    with _lock:
        known = _engines.pop(engine, None) is not None
        last = not _engines
    if known:
        engine.shutdown()
        if last:
            stop_waiter()


def _end_all() -> None:
    for engine in list(_engines):
        end(engine)


def _tell_peers(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    for engine, rank in list(_engines.items()):
        engine.abort(f"rank {rank} {describe_error(kind, error, trace)}")
