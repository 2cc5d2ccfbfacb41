"""A process that is to be started, and how long one waits after others have failed there."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.launch.process.placement import Placement

_FIRST_WAIT = 1.0  # seconds after the first failure
_LONGEST_WAIT = 60.0
_GOOD_LIFE = 60.0  # seconds after which earlier failures do not count any more


@dataclass(frozen=True)
class Start:
    """A process to start."""

    worker: int  # its number, which is never used again
    host: str  # the name of its host
    slot: int  # its slot there, from 0
    joiner: bool  # whether it is started after the first ones
    # The numbers that its environment gets; in an elastic job, those that it will probably have.
    placement: Placement


class BackOff:
    """When the next attempt is made in a place where earlier ones have failed, later and later."""

    def __init__(self) -> None:
        self.failures = 0  # how many have failed in a row; one after a good life is the first again
        self.ready_at = 0.0  # when the next attempt may be made, in seconds

    def failed(self, now: float, lived: float = 0.0) -> float:
        """Note a failure after `lived` seconds; return the pause until the next attempt."""
        self.failures = 1 if lived >= _GOOD_LIFE else self.failures + 1
        pause = min(_FIRST_WAIT * 2.0 ** min(self.failures - 1, 10), _LONGEST_WAIT)
        self.ready_at = now + pause
        return pause
