"""How late each rank is: `hvd.lateness()` on rank 0, whose coordinator gets all requests."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite import basics
from hvdlite.errors import ArgumentError


@dataclass(frozen=True)
class RankLateness:
    """How late one rank was, as means over the steps; the last hundred count most.

    Attributes:
        rank: the rank.
        seconds: how long after the median rank it submitted its gradients, at most in a step.
        before_backward: how long after the median rank it submitted the first ones of the step.
        last: the share of the steps in which this rank was the last, from 0 to 1.
        step_seconds: the time from one step to the next, the same for all ranks.

    Example:
        >>> if hvd.rank() == 0:
        ...     for one in hvd.lateness():
        ...         print(f"rank {one.rank} is {one.seconds * 1e3:.1f} ms late in a step")
    """

    rank: int
    seconds: float
    before_backward: float
    last: float
    step_seconds: float


def lateness() -> list[RankLateness]:
    """Return how late each rank is, by rank; call it on rank 0. It sends nothing.

    A step begins when the name of an all-reduce of all ranks comes again; until there was a step,
    the list is empty. The ranks themselves say when they submitted, on rank 0's clock: between
    hosts trust tenths of a millisecond, not microseconds.

    Raises:
        ArgumentError: this is not rank 0, which alone gets the requests of all ranks.
        NotInitializedError: `hvd.init()` was not called.

    Example:
        >>> if hvd.rank() == 0:
        ...     slowest = max(hvd.lateness(), key=lambda one: one.seconds)
    """
    if basics.rank() != 0:
        raise ArgumentError(
            f"hvd.lateness() was called on rank {basics.rank()}; call it on rank 0 only, which "
            "gets the requests of all ranks"
        )
    told = basics.engine().lateness()
    if told["steps"] == 0:
        return []
    return [
        RankLateness(rank, late, before_backward, last, told["step_seconds"])
        for rank, (late, before_backward, last) in enumerate(told["ranks"])
    ]
