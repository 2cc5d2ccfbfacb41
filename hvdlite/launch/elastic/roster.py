"""What the membership knows of each worker, and how it names workers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_NAMED = 4  # a sentence names at most so many workers


class Phase(enum.Enum):
    """What the job does; `membership` says more."""

    STARTING = "starting"
    FORMED = "formed"
    GATHERING = "gathering"
    FORMING = "forming"
    DONE = "done"
    OVER = "over"


class Stage(enum.Enum):
    """Where a worker stands between its start and its end, as far as its messages tell."""

    STARTING = "starting"  # its process was announced; it has not said READY
    WAITING = "waiting"  # READY to start or to join; in no epoch yet
    RUNNING = "running"  # a member that trains, or that has not yet answered GATHER
    SUSPENDED = "suspended"  # a member whose engine has ended
    BOUNDARY = "boundary"  # a member that waits in `hvd.elastic.run`
    COMING = "coming"  # a member that got CUT or RESTORE, and comes to the boundary by itself


@dataclass
class Worker:
    """One living worker."""

    number: int  # never used again
    host: str  # where it runs, for sentences
    joiner: bool  # whether it was started after the first epoch
    stage: Stage = Stage.STARTING
    # This says how others reach it; opaque but for "agreed".
    endpoint: dict[str, Any] = field(default_factory=dict)
    stuck: str | None = None  # why a collective of it cannot be redone; None if all can
    restored: bool = False  # whether it came to the boundary through HorovodInternalError
    fresh: bool = True  # whether it has not passed a boundary yet
    # This says whether it has the job's state. The first workers have, a joiner once it has synced.
    synced: bool = True
    asked: int = -1  # the epoch of the newest GATHER that was sent to it
    raised: str = ""  # what its script raised, for sentences; "" if it has not told
    draining: str | None = None  # why it shall leave at the next boundary; None if it shall not
    wishes: bool = False  # whether it shall leave because it has asked to
    connected: bool = False  # whether it has said CONNECTED to the epoch that is being formed
    clock: Any = None  # what it sent with CONNECTED
    expected_at: float = 0.0  # when its process was about to be started
    ready_at: float = 0.0  # when it first said READY

    @property
    def name(self) -> str:
        """The name of the worker in a sentence."""
        return f"worker {self.number} (host {self.host})"

    @property
    def answered(self) -> bool:
        """Whether a new epoch can be decided without waiting for this member."""
        return self.stage in (Stage.SUSPENDED, Stage.BOUNDARY)


@dataclass(frozen=True)
class Departed:
    """A worker that is not with the job any more, and whose process has not ended yet."""

    worker: Worker  # who it was
    # This says when its process must have ended; infinity if it said goodbye, or that it has
    # failed.
    due: float
    member: bool  # whether it was a member
    at: float  # when it departed


def named(workers: Sequence[Worker]) -> str:
    """Name some workers in a sentence: the first few, and how many more there are."""
    return listed([worker.name for worker in workers], ", ")


def listed(texts: Sequence[str], separator: str) -> str:
    """Join the first few texts, and say how many more there are."""
    shown = separator.join(texts[:_MOST_NAMED])
    more = len(texts) - _MOST_NAMED
    return f"{shown}{separator}and {more} more" if more > 0 else shown


def mismatch(joiner: Worker, member: Worker) -> str | None:
    """Return how the settings of a joiner differ from those of a member; None if they agree."""
    # Both endpoints carry their settings, by name, under "agreed".
    theirs, ours = joiner.endpoint.get("agreed"), member.endpoint.get("agreed")
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return None
    different = [
        f"{name} is {theirs.get(name, 'unset')} on {joiner.name}, "
        f"and {ours.get(name, 'unset')} on {member.name}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(different) or None
