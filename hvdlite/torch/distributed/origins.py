"""Names what the callbacks of futures start, so that it is the same on all ranks.

The callback of a future runs in the thread that completes it, or at once in the thread that calls
`then`. Which of these it is, and what the program starts meanwhile, differs from rank to rank. So
what a callback starts is not counted with what the program starts. Its name has the name of the
operation whose future called it, the place of the callback among those of that future, and its
place among the operations that the callback starts.

PyTorch has one class for all futures, and no way to tell a callback who calls it. So the first
`get_future` of a process adds that to the methods `then` and `add_done_callback` of that class. A
callback of a future that is not an operation's belongs to the place where it was added.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

# Names of callbacks that start operations with callbacks, and so on, would grow without limit.
_LONGEST = 160

Callback = Callable[[Any], Any]


class Origin:
    """An operation, or a callback of its future."""

    __slots__ = ("_callbacks", "_started", "group", "kind", "name", "text")

    def __init__(self, group: object, name: str, kind: str, text: str = "") -> None:
        self.group = group  # the numbering of the operation's process group
        self.name = _short(name)  # the same on all ranks, and unique in the group
        self.kind = _short(kind)  # Such operations of other groups have the same kind.
        self.text = text  # The engine knows the operation by it; a callback has none.
        self._callbacks = itertools.count()
        self._started: dict[str, int] = {}

    def callback(self) -> Origin:
        """Return the origin that the next callback is for what it starts."""
        count = next(self._callbacks)
        return Origin(self.group, f"{self.name}/{count}", f"{self.kind}/{count}")

    def next(self, signature: str) -> str:
        """Return the name of the next operation that this callback starts in its own group."""
        count = self._started.get(signature, 0)
        self._started[signature] = count + 1
        return _short(f"{self.name}/{signature}#{count}")


def _short(name: str) -> str:
    if len(name) <= _LONGEST:
        return name
    return "..." + hashlib.sha256(name.encode()).hexdigest()[:32]


_here = threading.local()
_origins: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_plain: dict[str, Callable[..., Any]] = {}  # Torch's class of futures has these methods.


def current() -> Origin | None:
    """Return the callback in which this thread is; None outside of callbacks."""
    return getattr(_here, "origin", None)


def future_of(
    base: Any, give: Callback, origin: Origin | None, before_wait: Callable[[], None]
) -> Any:
    """Return a future with the value that `give` makes of `base`, and an operation's callbacks."""
    _install(before_wait)
    future = _plain["then"](base, give)
    if origin is not None:
        _origins[future] = origin
    return future


def _install(before_wait: Callable[[], None]) -> None:
    """Extend torch's futures once; a thread that waits for one calls `before_wait` first."""
    with _lock:
        if _plain:
            return
        kind: Any = torch._C.Future
        _plain.update({name: getattr(kind, name) for name in ("then", "add_done_callback", "wait")})
        kind.then = _then
        kind.add_done_callback = _add_done_callback

        def wait(future: Any) -> Any:
            if not future.done():
                before_wait()
            return _plain["wait"](future)

        kind.wait = wait


def _then(future: Any, callback: Callback) -> Any:
    """Do what torch's method does; the new future has callbacks of the same operation."""
    inside = _inside(future)
    made = _plain["then"](future, _in_origin(inside, callback))
    if inside is not None and future in _origins:
        _origins[made] = inside
    return made


def _add_done_callback(future: Any, callback: Callback) -> None:
    _plain["add_done_callback"](future, _in_origin(_inside(future), callback))


def _inside(future: Any) -> Origin | None:
    origin = _origins.get(future)
    return current() if origin is None else origin.callback()


def _in_origin(origin: Origin | None, callback: Callback) -> Callback:
    """Return a callback that runs as the one with this origin."""

    def call(future: Any) -> Any:
        outside = current()
        _here.origin = origin
        try:
            return callback(future)
        finally:
            _here.origin = outside

    return call
