"""Who joins and who leaves when all members are at a boundary, and when to call them there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.launch.elastic.actions import Limits
from hvdlite.launch.elastic.roster import Stage, Worker


@dataclass(frozen=True)
class Plan:
    """What happens at a boundary."""

    leavers: list[Worker]  # leave now, whether or not the others go on
    joiners: list[Worker]  # join if the others go on
    missing: int  # how many workers are missing; the boundary waits for them


def plan(
    limits: Limits, members: Sequence[Worker], waiting: Sequence[Worker], growing: bool
) -> Plan:
    """Decide who leaves, who joins, and how many workers are missing."""
    # A member that shall leave stays as long as nobody else has the job's state: it first hands the
    # state over, in an epoch with joiners, or another one if a joiner has died. A job that does not
    # grow any more, because some worker has finished, goes on with any number of workers.
    # `waiting` has joiners, in the order in which they may join.
    # `growing` says whether joiners may join.
    staying = [worker for worker in members if worker.draining is None]
    joiners = fitting(limits, members, waiting) if growing else []
    if not any(worker.synced for worker in staying):
        return Plan([], joiners, missing=0 if staying or joiners or not growing else 1)
    leavers = [worker for worker in members if worker.draining is not None]
    short = limits.min_np - len(staying) - len(joiners) if growing else 0
    return Plan(leavers, joiners, max(0, short))


def fitting(limits: Limits, members: Sequence[Worker], waiting: Sequence[Worker]) -> list[Worker]:
    """Return the joiners for whom there is room at the next boundary."""
    if limits.max_np is None:
        return list(waiting)
    staying = [worker for worker in members if worker.draining is None]
    room = limits.max_np - len(staying)
    return list(waiting[: max(0, room)])


def company_until(joiners: Sequence[Worker], starting: Sequence[Worker]) -> float:
    """Return until when joiners that are ready wait for those that still start."""
    # A new host starts several workers at once, and their start-up differs. One change of hosts is
    # to be one epoch, so the first one waits as long again as its own start has taken.
    if not joiners or not starting:
        return -math.inf
    first = min(joiners, key=lambda one: one.ready_at)
    return 2 * first.ready_at - first.expected_at


class Notices:
    """When the members are told to come to the next boundary."""

    # A notice says that somebody joins or leaves, or that data is to be distributed anew because a
    # worker has gone. It is due once for each such reason, and again in each new epoch.

    def __init__(self) -> None:
        self.deal_anew = False
        # This says when joiners that are ready stop waiting for others; None if none does.
        self.complete_at: float | None = None
        self._version = 0
        self._told: object = None

    def begin(self, at_boundary: bool) -> None:
        """Begin anew: an epoch was formed, or goes on; at a boundary with data distributed anew."""
        self._told = None
        if at_boundary:
            self.deal_anew = False

    def due(
        self,
        limits: Limits,
        members: Sequence[Worker],
        joining: Sequence[Worker],
        growing: bool,
        now: float,
    ) -> tuple[int, bool] | None:
        """Return the version of a notice that is due now, and whether nobody joins by it."""
        # `joining` are the workers that wait to join, and behind them those that still start.
        fit = fitting(limits, members, joining) if growing else []
        joiners = [one for one in fit if one.stage is Stage.WAITING]
        starting = [one for one in fit if one.stage is Stage.STARTING and one.draining is None]
        until = company_until(joiners, starting)
        self.complete_at = until if now < until else None
        told = [] if now < until else [worker.number for worker in joiners]
        leavers = [worker.number for worker in members if worker.draining is not None]
        reasons = (told, leavers, self.deal_anew)
        if not any(reasons) or reasons == self._told:
            return None
        self._told = reasons
        self._version += 1
        return self._version, not joiners
