"""Names of operations: torch.distributed matches operations by their order, and the engine by name.

A name is the operation's *signature* (kind, reduce operation, dtype, number of elements), which all
members know, and the number of the operation among those of its signature, modulo 8. So names
repeat from step to step, and the engine's response cache knows them. And members that submit
operations of different signatures in different orders still get the right results. A counter stays
for each signature.

What a callback of a future starts has names of its own (`origins`). These do not repeat, nor do
those of transfers between two ranks, any number of which may be in flight. They begin with "#", so
that the engine's cache does not keep them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from hvdlite import _core
from hvdlite.torch.distributed import origins
from hvdlite.torch.distributed.origins import Origin

SLOTS = 8
_LOOKS = 2  # Each new name looks whether so many others have ended.


class Name(NamedTuple):
    """How an operation is called."""

    text: str  # The engine knows the operation by this text.
    origin: Origin  # Callbacks of the operation's future have this in their names.


class Numbering:
    """The names of one process group. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._in_flight: dict[str, _core.Handle] = {}

    def next(self, signature: str, seconds: float | None = None) -> Name:
        """Return the next collective's name; wait `seconds`, or raise, while it is in flight."""
        with self._lock:
            name = self._name(signature)
            earlier = self._in_flight.get(name.text)
        if earlier is not None:
            try:
                earlier.wait(seconds)
            except (RuntimeError, TimeoutError):
                # The thread that waits for that operation gets its error.
                if not earlier.done():
                    raise
        return name

    def _name(self, signature: str) -> Name:
        around = origins.current()
        if around is not None and around.group is self:
            text = around.next(signature)
            return Name(f"#{text}", Origin(self, text, f"{around.kind}/{signature}"))
        if around is not None:
            signature = f"{around.kind}/{signature}"
        count = self._count(signature)
        origin = Origin(self, f"{signature}#{count}", signature)
        return Name(f"{signature}#{count % SLOTS}", origin)

    def next_of_pair(self, way: str) -> str:
        """Return the name of the next transfer from one rank to another, with one tag."""
        with self._lock:
            return f"#{way}#{self._count(way)}"

    def _count(self, signature: str) -> int:
        count = self._counts.get(signature, 0)
        self._counts[signature] = count + 1
        return count

    def started(self) -> int:
        """Return how many operations have names, besides those that callbacks started."""
        with self._lock:
            return sum(self._counts.values())

    def note(self, name: str, handle: _core.Handle) -> None:
        """Note the operation that has this name now, and forget some that have ended."""
        with self._lock:
            # A noted handle keeps the memory of its operation.
            noted = self._in_flight
            for _ in range(min(_LOOKS, len(noted))):
                oldest = next(iter(noted))
                one = noted.pop(oldest)
                if not one.done():
                    noted[oldest] = one
            noted[name] = handle

    def in_flight(self) -> list[_core.Handle]:
        """Return the operations that have not ended."""
        with self._lock:
            return [one for one in self._in_flight.values() if not one.done()]
