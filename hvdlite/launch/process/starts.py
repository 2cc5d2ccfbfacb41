"""A process that is to be started, and how long one waits after others have died in its place."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.launch.process.placement import Placement

FIRST_WAIT = 1.0  # seconds after the first failure
LONGEST_WAIT = 60.0


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


def pause_after(failures: int) -> float:
    """Return the seconds until the next attempt after so many failures in a row.

    Example:
        >>> [pause_after(failures) for failures in (1, 2, 3, 100)]
        [1.0, 2.0, 4.0, 60.0]
    """
    return min(FIRST_WAIT * 2.0 ** min(failures - 1, 10), LONGEST_WAIT)
