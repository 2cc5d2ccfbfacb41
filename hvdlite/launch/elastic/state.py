"""What the membership knows: its workers, and what happened in an epoch."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.launch.elastic.messages import EpochFormed, Message

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
    COMING = "coming"  # a member that was told to come, and comes to the boundary by itself


@dataclass
class Worker:
    number: int  # never used again
    host: str  # where it runs, for sentences
    joiner: bool  # whether it was started after the first epoch
    stage: Stage = Stage.STARTING
    # How others reach it; opaque but for "agreed".
    endpoint: dict[str, Any] = field(default_factory=dict)
    stuck: str | None = None  # why a collective of it cannot be redone; None if all can
    restored: bool = False  # whether it came to the boundary through HorovodInternalError
    fresh: bool = True  # whether it has not passed a boundary yet
    # Whether it has the job's state: the first workers have, a joiner once it has synced.
    synced: bool = True
    asked: int = -1  # the epoch of the newest GATHER that was sent to it
    raised: str = ""  # what its script raised, for sentences; "" if it has not told
    draining: str | None = None  # why it shall leave at the next boundary; None if it shall not
    wishes: bool = False  # whether it shall leave because it has asked to
    connected: bool = False  # whether it has said CONNECTED to the epoch that is being formed
    clock: Any = None  # what it sent with CONNECTED
    expected_at: float = 0.0  # when its process was about to be started
    ready_at: float = 0.0  # when it first said READY
    # Of a worker that has departed, and whose process has not ended yet:
    departed_at: float = 0.0
    was_member: bool = False
    # When its process must have ended; infinity if it said goodbye, or that it has failed.
    end_due: float = math.inf

    @property
    def name(self) -> str:
        return f"worker {self.number} (host {self.host})"

    @property
    def answered(self) -> bool:
        """Whether a new epoch can be decided without waiting for this member."""
        return self.stage in (Stage.SUSPENDED, Stage.BOUNDARY)


def named(workers: Sequence[Worker]) -> str:
    return listed([worker.name for worker in workers], ", ")


def listed(texts: Sequence[str], separator: str) -> str:
    """Join the first few texts, and say how many more there are."""
    shown = separator.join(texts[:_MOST_NAMED])
    more = len(texts) - _MOST_NAMED
    return f"{shown}{separator}and {more} more" if more > 0 else shown


def mismatch(joiner: Worker, member: Worker) -> str | None:
    """Return how the settings of a joiner differ from those of a member; None if they agree."""
    # Both endpoints carry their settings, by name, under "agreed".
    theirs, ours = (one.endpoint.get("agreed", {}) for one in (joiner, member))
    different = [
        f"{name} is {theirs.get(name, 'unset')} on {joiner.name}, "
        f"and {ours.get(name, 'unset')} on {member.name}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(different) or None


@dataclass
class Change:
    """Why an epoch follows another one."""

    name: str  # what changed: a worker, by its name
    why: str  # the rest of the clause: "died of SIGKILL", "finished"
    worker: int | None = None  # the number of the worker that went; None if nobody did
    trouble: bool = True  # whether something went wrong
    counts: bool = True  # whether the next epoch is a reset; not if a worker has finished

    @property
    def text(self) -> str:
        return f"{self.name} {self.why}"


class Record:
    """The record of one epoch, from the moment in which it was formed."""

    def __init__(self) -> None:
        self.whole = True  # whether nobody has gone and no link broke
        # By process set, the newest commit that any worker has reported.
        self.commit_point: dict[str, int] = {}
        self.steps: int | None = None  # committed in the epoch; None if workers do not report it
        self._changes: list[Change] = []
        self._symptom: Change | None = None  # what a worker reported, if nobody is to blame
        self.first_sign: float | None = None  # when it came that an epoch must follow

    def report(self, message: Message) -> None:
        """Note what a worker has handed out: the commit point is never below it."""
        # Also that of workers that die afterwards: who completed a commit knows that all members
        # have executed what is in it, so the others can hand it out.
        commits: Mapping[str, int] = message.get("commits") or {}
        for name, count in commits.items():
            self.commit_point[name] = max(count, self.commit_point.get(name, count))
        if message.get("steps") is not None:
            self.steps = max(message["steps"], self.steps or 0)

    def sign(self, now: float) -> None:
        self.first_sign = now if self.first_sign is None else self.first_sign

    def went(self, change: Change, now: float) -> None:
        self.whole = False
        self._changes.append(change)
        self.sign(now)

    def symptom(self, name: str, why: str) -> None:
        """A worker reported something that explains the next epoch if nothing better does."""
        self._symptom = self._symptom or Change(name, why)

    def accept_symptom(self) -> None:
        """Nothing explains it better."""
        if self._symptom is not None and not self._changes:
            self._changes.append(self._symptom)

    def learn(self, worker: int, why: str, trouble: bool, counts: bool) -> bool:
        """More is known about how a worker has gone; return whether this epoch ends by it."""
        known = [change for change in self._changes if change.worker == worker]
        for change in known:
            change.why, change.trouble, change.counts = why, trouble, counts
        return bool(known)

    @property
    def changed(self) -> bool:
        return bool(self._changes)

    @property
    def quiet(self) -> bool:
        """Whether only workers that finished have gone."""
        return self.changed and not any(change.counts for change in self._changes)

    @property
    def trouble(self) -> Change | None:
        return next((change for change in self._changes if change.trouble), None)

    @property
    def killed(self) -> list[Change]:
        """Those that went, if something went wrong with each of them."""
        return self._changes if all(change.trouble for change in self._changes) else []

    @property
    def gone(self) -> list[tuple[int, str]]:
        return [(one.worker, one.why) for one in self._changes if one.worker is not None]

    def reason(self, joined: Sequence[Worker] = ()) -> str:
        texts = [change.text for change in self._changes]
        if not texts and self._symptom is not None:
            texts = [self._symptom.text]
        return listed([*texts, *(f"{one.name} joined" for one in joined)], "; ")

    def nobody_left(self) -> str:
        trouble = self.trouble
        if trouble is None:
            return f"no worker is left: {self.reason()}"
        return f"no worker is left; the first that went: {trouble.text}"


@dataclass(frozen=True)
class Formed:
    epoch: int  # its number
    workers: tuple[int, ...]  # its members by rank
    joined: list[Worker]  # those that were not members before
    record: Record  # It is that of the epoch before.
    at: float  # when it was formed

    def event(self) -> EpochFormed:
        one = len(self.workers) == 1
        ranks = "1 rank" if one else f"{len(self.workers)} ranks"
        if self.epoch == 0:
            line = f"world 0: {ranks} start{'s' if one else ''}"
        else:
            sign = self.record.first_sign
            took = 0.0 if sign is None else 1000 * (self.at - sign)
            reason = self.record.reason(self.joined)
            line = f"world {self.epoch}: {reason}; {ranks} {'goes' if one else 'go'} on"
            line += f" after {took:.0f} ms"
        return EpochFormed(self.epoch, self.workers, line)
