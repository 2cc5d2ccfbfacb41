"""`Late`: for whom the ranks wait in a step, and what becomes of a gradient that comes late."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

from hvdlite.errors import ArgumentError

POLICIES = ("fold", "drop")


@dataclass(frozen=True)
class Late:
    """Lets a step go on without ranks that are late; for `DistributedOptimizer(late=...)`.

    When `quorum` of the ranks have submitted a gradient, the others have `grace` more time. A step
    then goes on with the gradients that are there. A late gradient is added to a later step.

    Args:
        quorum: the share of the ranks that suffices, more than 0 and at most 1.
        grace: how long the step waits for more, as a share of the median step, which is measured,
            or as a `datetime.timedelta`.
        bound: how many steps a rank may be behind; the others wait for one that is further behind.
        policy: "fold" adds a late gradient to a later step; "drop" forgets it.

    Raises:
        ArgumentError: a value cannot be used.

    Example:
        >>> Late(quorum=0.75).members(4)
        3
    """

    quorum: float = 0.5
    grace: float | datetime.timedelta = 0.1
    bound: int = 4
    policy: str = "fold"

    def __post_init__(self) -> None:
        if not 0.0 < self.quorum <= 1.0:
            raise ArgumentError(
                f"Late(quorum={self.quorum!r}): give the share of the ranks for which a step "
                "waits, more than 0 and at most 1"
            )
        seconds = self.grace
        if isinstance(seconds, datetime.timedelta):
            seconds = seconds.total_seconds()
        if not 0.0 <= seconds < math.inf:
            raise ArgumentError(
                f"Late(grace={self.grace!r}): give a share of the median step, such as 0.1, or a "
                "datetime.timedelta; it is not negative"
            )
        if isinstance(self.bound, bool) or not isinstance(self.bound, int) or self.bound < 1:
            raise ArgumentError(
                f"Late(bound={self.bound!r}): give the number of steps that a rank may be behind, "
                "1 or more"
            )
        if self.policy not in POLICIES:
            raise ArgumentError(f"Late(policy={self.policy!r}): use 'fold' or 'drop'")

    def members(self, size: int) -> int:
        """Return how many of so many ranks suffice."""
        return max(1, math.ceil(self.quorum * size - 1e-9))

    @property
    def seconds(self) -> float | None:
        """The grace in seconds; None if it is a share of a step."""
        given = isinstance(self.grace, datetime.timedelta)
        return self.grace.total_seconds() if given else None  # type: ignore[union-attr]
