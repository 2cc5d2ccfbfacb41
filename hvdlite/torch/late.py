"""Late gradients: in each step the ranks that are in time give their gradients, and all step.

The coordinator decides, at the first bucket of a step, whose gradients are in it: it waits for a
quorum, and then for the grace. A rank that is late takes part in the data plane all the same, from
the engine's thread, and its result *waits* until its training thread asks for it. Its own
gradient is *folded* into the next sum of that bucket. So all ranks get the same results in the same
order. The sources are backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016)
and eager-SGD (Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial
Collective Operations", PPoPP 2020).
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import math
import statistics
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdlite import _core, basics, ops
from hvdlite.errors import ArgumentError, LateGradientsWarning
from hvdlite.objects import gather_json
from hvdlite.optimizers import check_mean
from hvdlite.process_sets import registered_id
from hvdlite.torch.buckets import GradientExchange, Settings
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.wrapping import Wrapping

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


MEASURED = 20  # So many steps wait for all ranks; their median is the measure of the grace.
PERIOD = 1000  # Measurements are so many steps apart; later ones are of steps that do not wait.
REVIEWED = 50  # Looks at the participation are so many steps apart.

_KEY = "hvdlite.roll_call"

_all: weakref.WeakSet[LateExchange] = weakref.WeakSet()


class Attendance(NamedTuple):
    """What became of the gradients of one rank."""

    rank: int
    late: int  # So many steps went on without this rank's gradient.
    # The rank computed no gradient for so many steps. Only the rank itself knows this and what
    # follows; they are None for the others.
    skipped: int | None
    folded: int | None  # So many gradients were added to a later step.
    oldest: int | None  # The oldest of these was late by so many steps.


def may_be_behind() -> bool:
    """Return whether there is an optimizer with `late=`, so that ranks skip their forward."""
    if _all:
        gc.collect()  # It may belong to an optimizer that is no longer used.
    return bool(_all)


def check_late(late: Any, op: int) -> None:
    if late is None:
        return
    if not isinstance(late, Late):
        raise ArgumentError(f"late={late!r}: give hvd.Late(...), or leave it out")
    check_mean("late=", op, "a step divides by the number of gradients that are in it")
    if basics.in_elastic_job():
        raise ArgumentError(
            "late= cannot be combined with an elastic job: the gradients of a step come from the "
            "same ranks there; leave late= out"
        )


class LateExchange(GradientExchange):
    """Sums the gradients that are there in time, and adds late ones to later sums."""

    of_one_step = False

    def __init__(self, name: str, settings: Settings, late: Late) -> None:
        super().__init__(name, dataclasses.replace(settings, sparse_as_dense=True))
        process_set = settings.reduction.process_set
        self.late = late
        self._key_prefix = f"{name}@{registered_id(process_set)}"
        self.step_seconds: float | None = None  # This is the median.
        self._process_set = process_set
        self._fresh = False  # It says whether this rank has a gradient in the cycle.
        self._first = ops.name_restarts()
        self.begin_anew()
        _all.add(self)
        if late.policy == "drop" and process_set.rank() == 0:
            warnings.warn(
                "Late(policy='drop') forgets late gradients: samples that only a slow rank has are "
                "then never learnt. Deal the samples to the ranks at random, or use policy='fold'",
                LateGradientsWarning,
                stacklevel=2,
            )

    @property
    def key(self) -> str:
        """The key of the late gradients in the engine: another one whenever ranks count anew."""
        return f"{self._key_prefix}.{self._restarts - self._first}"

    @property
    def behind(self) -> int:
        if not self._process_set.included():
            return 0
        return _core.waiting_results(basics.engine(), self.key)

    def attendance(self) -> list[Attendance]:
        """Return a row for each member, as far as this rank knows."""
        if not self._process_set.included():
            return []
        rows = _core.attendance(basics.engine(), self.key)
        own = basics.rank()
        return [
            Attendance(rank, row[0], *(row[1:] if rank == own else (None, None, None)))
            for rank, row in zip(self._process_set.ranks, rows, strict=False)
        ]

    # These methods belong to a cycle.

    def begin_anew(self) -> None:
        self._restarts = ops.name_restarts()
        self._cycle = -1  # All ranks count cycles from the last restart.
        self._steps = 0  # So many steps have ended since then.
        self._settled = self.late.seconds is not None  # It says whether all ranks know the grace.
        self._durations: deque[float] = deque(maxlen=100)  # They are of steps with a gradient.
        self._ended: float | None = None  # The last step ended then.
        self._reviewed: list[int] = []  # These are the late counts of members at the last review.

    def begin(self) -> None:
        self._cycle += 1

    def reduction(self, reduction: Reduction, fresh: bool) -> Reduction:
        # Without a gradient in the cycle this rank gives nothing, and takes the result.
        self._fresh = fresh
        size = self._process_set.size() or 1
        late = self.late
        quorum, grace = size, 0
        if self._settled:
            quorum, grace = late.members(size), self._grace_microseconds()
        terms = _core.LateCall(
            self.key, self._cycle, quorum, grace, late.bound, late.policy == "fold", not fresh
        )
        return reduction._replace(terms=terms)

    def _grace_microseconds(self) -> int:
        seconds = self.late.seconds
        if seconds is None:
            assert isinstance(self.late.grace, float | int)
            seconds = float(self.late.grace) * (self.step_seconds or 0.0)
        return round(1e6 * seconds)

    # These run in the training thread, outside of backward: ranks may meet here.

    def after_step(self) -> None:
        if not self._process_set.included():
            return
        self._steps += 1
        now, before = time.monotonic(), self._ended
        if before is not None and self._fresh:
            self._durations.append(now - before)
        if self.late.seconds is None:
            first = self._steps == 1  # A rank may know the time from a file.
            measured = self._steps == MEASURED and not self._settled
            if first or measured or self._steps % PERIOD == 0:
                self._measure()
                now = time.monotonic()
        if self._steps % REVIEWED == 0:
            self._review()
        self._ended = now

    def _measure(self) -> None:
        """Agree with the other ranks on the median step; the engine takes the new grace at once."""
        known = self.step_seconds if self._steps == 1 else None
        value = [known, list(self._durations)]
        told = gather_json(value, f"#{self.key}.step_seconds", self._process_set).values()
        files = [seconds for seconds, _ in told if seconds is not None]
        durations = [seconds for _, measured in told for seconds in measured]
        if files:
            self.step_seconds = files[0]
        elif durations:
            self.step_seconds = statistics.median(durations)
        self._settled = bool(files or durations)

    def _review(self) -> None:
        """Warn of ranks whose gradients were late in all steps since the last review."""
        late = [row.late for row in self.attendance()]
        before, self._reviewed = self._reviewed or [0] * len(late), late
        absent = [
            rank
            for rank, now, then in zip(self._process_set.ranks, late, before, strict=False)
            if now - then >= REVIEWED
        ]
        if absent and self._process_set.rank() == 0:
            ranks = ", ".join(f"rank {rank}" for rank in absent)
            lost = "forgotten" if self.late.policy == "drop" else "added to later steps"
            warnings.warn(
                f"{REVIEWED} steps in a row went on without a gradient of {ranks}, whose gradients "
                f"were {lost}. Does the loop skip its forward and backward while "
                "optimizer.behind is not zero? Otherwise give these ranks less work, or "
                "hvd.Late a larger quorum",
                LateGradientsWarning,
                stacklevel=2,
            )


class LateStepping(Wrapping):
    _reducer: Any

    @property
    def _late(self) -> LateExchange | None:
        exchange = self._reducer.exchange
        return exchange if isinstance(exchange, LateExchange) else None

    @property
    def behind(self) -> int:
        """How many steps the others are ahead of this rank, whose results wait for it.

        A rank that is behind takes these results without computing gradients. Without `late=` it is
        zero.

        Example:
            >>> for batch in batches:
            ...     if not optimizer.behind:
            ...         loss_of(model, batch).backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        late = self._late
        return 0 if late is None else late.behind

    @property
    def attendance(self) -> list[Attendance]:
        """For each rank, how often it was late; empty without `late=`.

        How often a rank skipped a step, and what became of its late gradients, it knows itself.

        Example:
            >>> optimizer.attendance[3].late
            12
        """
        late = self._late
        return [] if late is None else late.attendance()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; see `torch.optim.Optimizer.state_dict`.

        With `late=` it has the median time of a step, and a plain optimizer loads it, too. Late
        gradients that no step has used yet are not in it.
        """
        state: dict[str, Any] = super().state_dict()
        late = self._late
        return state if late is None else {**state, _KEY: {"step_seconds": late.step_seconds}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; with `late=` also the median time of a step, before the first step."""
        super().load_state_dict(state_dict)
        late = self._late
        if late is not None and _KEY in state_dict and not late.step_seconds:
            late.step_seconds = state_dict[_KEY]["step_seconds"]
