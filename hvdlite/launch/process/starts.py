"""A process that is to be started, and how long one waits after others have failed there."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.launch.process.placement import Placement

_FIRST_WAIT = 1.0  # seconds after the first failure
_LONGEST_WAIT = 60.0
_GOOD_LIFE = 60.0  # seconds after which earlier failures do not count any more


@dataclass(frozen=True)
class Start:
    """A process to start.

    Attributes:
        worker: its number, which is never used again.
        host: the name of its host.
        slot: its slot there, from 0.
        joiner: whether it is started after the first ones.
        placement: the numbers that its environment gets; in an elastic job, those that it will
            probably have.
    """

    worker: int
    host: str
    slot: int
    joiner: bool
    placement: Placement


class BackOff:
    """When the next attempt is made in a place where earlier ones have failed, later and later.

    Attributes:
        failures: how many have failed in a row; one after a good life is the first again.
        ready_at: when the next attempt may be made, in seconds.

    Example:
        >>> slot = BackOff()
        >>> [slot.failed(now=100.0) for _ in range(4)], slot.failed(now=200.0, lived=60.0)
        ([1.0, 2.0, 4.0, 8.0], 1.0)
    """

    def __init__(self) -> None:
        self.failures = 0
        self.ready_at = 0.0

    def failed(self, now: float, lived: float = 0.0) -> float:
        """Note a failure after `lived` seconds; return the pause until the next attempt."""
        self.failures = 1 if lived >= _GOOD_LIFE else self.failures + 1
        pause = min(_FIRST_WAIT * 2.0 ** min(self.failures - 1, 10), _LONGEST_WAIT)
        self.ready_at = now + pause
        return pause
