"""Clocks of workers: how many steps each has done, and who has to wait for whom.

Bounded staleness is stale synchronous parallel (Ho et al., NIPS 2013). A worker at clock c that has
a bound k gets values when every worker that takes part is at clock c - k or later. So it sees all
pushes of the others up to that clock.

Example:
    >>> clocks = Clocks()
    >>> clocks.join(0), clocks.join(1)
    (0, 0)
    >>> clocks.advance(0, 2)
    >>> clocks.may_pull(2, staleness=1), clocks.may_pull(2, staleness=2)
    (False, True)
    >>> clocks.leave(1)
    >>> clocks.may_pull(2, staleness=0)
    True
"""

from __future__ import annotations

from hvdlite.errors import ArgumentError


class Clocks:
    """The clocks of the workers that take part in a collection. The caller locks."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._last = 0  # A worker that joins when there are no others begins there.

    @property
    def least(self) -> int:
        """The clock of the worker that is furthest behind."""
        return min(self._clocks.values(), default=self._last)

    def begin_at(self, clock: int) -> None:
        """Let the first worker begin at this clock."""
        self._last = clock

    def of(self, worker: int) -> int:
        """Return the clock of a worker."""
        return self._clocks[worker]

    def join(self, worker: int, clock: int | None = None) -> int:
        """Let a worker take part; by default at the clock of the worker that is furthest behind."""
        self._clocks[worker] = self.least if clock is None else clock
        return self._clocks[worker]

    def advance(self, worker: int, clock: int) -> None:
        """Set a worker's clock, unless it has gone or is further already."""
        if worker in self._clocks:
            self._clocks[worker] = max(self._clocks[worker], clock)

    def leave(self, worker: int) -> None:
        """Forget a worker, for which nobody waits any more."""
        least = self.least
        self._clocks.pop(worker, None)
        self._last = max(self._last, least)

    def may_pull(self, clock: int, staleness: int | None) -> bool:
        """Return whether a worker at this clock may get values now; None sets no bound."""
        return staleness is None or self.least >= clock - staleness


def check_pace(staleness: int | None, push_every: int, pull_every: int) -> None:
    """Raise ArgumentError unless a worker can keep step with the others by these numbers."""
    # It may be `staleness` steps ahead of the slowest worker (None: any number), and pushes and
    # pulls once in so many steps.
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ArgumentError(f"staleness={staleness!r} is not None, 0 or a number of steps")
    for name, every in (("push_every", push_every), ("pull_every", pull_every)):
        if type(every) is not int or every < 1:
            raise ArgumentError(f"{name}={every!r} is not a number of steps from 1 on")
