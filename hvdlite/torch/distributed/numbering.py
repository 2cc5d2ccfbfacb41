"""Names of operations: torch.distributed matches operations by their order, and the engine by name.

A name is the operation's *signature* (kind, reduce operation, dtype, number of elements), which all
members know, and the number of the operation among those of its signature, modulo 8. So names
repeat from step to step, and the engine's response cache knows them. And members that submit
operations of different signatures in different orders still get the right results. A counter stays
for each signature.
"""

from __future__ import annotations

import threading

from hvdlite import _core

SLOTS = 8
_FEWEST = 512


class Numbering:
    """The names of one process group. Any thread may use it.

    Example:
        >>> numbering = Numbering()
        >>> [numbering.next("barrier") for _ in range(2)]
        ['barrier#0', 'barrier#1']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._in_flight: dict[str, _core.Handle] = {}
        self._look_at = _FEWEST  # names in `_in_flight` at which those that have ended go

    def next(self, signature: str, slots: int = SLOTS, seconds: float | None = None) -> str:
        """Return the name of the next operation; wait while the name is in flight.

        Args:
            signature: of the operation.
            slots: how many operations of this signature may be in flight.
            seconds: how long to wait; None means no limit.

        Raises:
            TimeoutError: that time passed first.
        """
        with self._lock:
            count = self._counts.get(signature, 0)
            self._counts[signature] = count + 1
            name = f"{signature}#{count % slots}"
            earlier = self._in_flight.get(name)
        if earlier is not None:
            try:
                earlier.wait(seconds)
            except (RuntimeError, TimeoutError):
                # The thread that waits for that operation gets its error.
                if not earlier.done():
                    raise
        return name

    def note(self, name: str, handle: _core.Handle) -> None:
        """Take note of the operation that has this name now."""
        with self._lock:
            self._in_flight[name] = handle
            if len(self._in_flight) >= self._look_at:
                names = self._in_flight.items()
                self._in_flight = {name: one for name, one in names if not one.done()}
                self._look_at = max(_FEWEST, 2 * len(self._in_flight))
