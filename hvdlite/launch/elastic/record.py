"""What happened since an epoch was formed: why it ends, and what its workers have handed out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdlite.launch.elastic.actions import EpochFormed, Message
from hvdlite.launch.elastic.roster import Worker, listed


@dataclass(frozen=True)
class Change:
    """Why an epoch follows another one."""

    name: str  # what changed: a worker, by its name
    why: str  # the rest of the clause: "died of SIGKILL", "finished"
    worker: int | None = None  # the number of the worker that went; None if nobody did
    trouble: bool = True  # whether something went wrong
    # This says whether the next epoch counts as a reset; that a worker has finished does not.
    counts: bool = True

    @property
    def text(self) -> str:
        """The clause for the line of the epoch."""
        return f"{self.name} {self.why}"


class Record:
    """The record of one epoch, from the moment in which it was formed."""

    def __init__(self) -> None:
        self.whole = True  # whether nobody has gone and no link broke
        # By process set, the newest commit that any worker has reported.
        self.commit_point: dict[str, int] = {}
        # This says how many steps the epoch has committed; None if the workers do not report it.
        self.steps: int | None = None
        self._changes: list[Change] = []
        self._symptom: Change | None = None  # what a worker reported, if nobody is to blame
        self._sign: float | None = None  # when the first sign came that an epoch must follow

    def report(self, message: Message) -> None:
        """Note what a worker has handed out: the commit point is never below it."""
        # Reports of workers that die afterwards count, too. Who completed a commit knows that all
        # members have executed what is in it, so the others can hand it out.
        commits: Mapping[str, int] = message.get("commits") or {}
        for name, count in commits.items():
            self.commit_point[name] = max(count, self.commit_point.get(name, count))
        if "steps" in message:
            self.steps = max(message["steps"], self.steps or 0)

    def sign(self, now: float) -> None:
        """Note the time of the first sign."""
        self._sign = now if self._sign is None else self._sign

    def went(self, change: Change, now: float) -> None:
        """A worker has gone."""
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
        known = any(change.worker == worker for change in self._changes)
        self._changes = [
            replace(change, why=why, trouble=trouble, counts=counts)
            if change.worker == worker
            else change
            for change in self._changes
        ]
        return known

    @property
    def changed(self) -> bool:
        """Whether anything is known to have changed."""
        return bool(self._changes)

    @property
    def quiet(self) -> bool:
        """Whether only workers that finished have gone."""
        return self.changed and not any(change.counts for change in self._changes)

    @property
    def trouble(self) -> Change | None:
        """What went wrong first."""
        return next((change for change in self._changes if change.trouble), None)

    @property
    def killed(self) -> list[Change]:
        """Those that went, if something went wrong with each of them."""
        return self._changes if all(change.trouble for change in self._changes) else []

    @property
    def gone(self) -> list[tuple[int, str]]:
        """The workers that have gone, each with the reason."""
        return [(one.worker, one.why) for one in self._changes if one.worker is not None]

    def reason(self, joined: Sequence[Worker] = ()) -> str:
        """Say why the next epoch follows."""
        texts = [change.text for change in self._changes]
        if not texts and self._symptom is not None:
            texts = [self._symptom.text]
        return listed([*texts, *(f"{one.name} joined" for one in joined)], "; ")

    def nobody_left(self) -> str:
        """Say why the job has failed if no worker is left."""
        trouble = self.trouble
        if trouble is None:
            return f"no worker is left: {self.reason()}"
        return f"no worker is left; the first that went: {trouble.text}"

    def line(self, epoch: int, world_size: int, joined: Sequence[Worker], now: float) -> str:
        """Return the line for the user about the epoch that follows."""
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        if epoch == 0:
            return f"world 0: {ranks} start{'s' if world_size == 1 else ''}"
        verb = "goes" if world_size == 1 else "go"
        took = 0.0 if self._sign is None else 1000 * (now - self._sign)
        return f"world {epoch}: {self.reason(joined)}; {ranks} {verb} on after {took:.0f} ms"


@dataclass(frozen=True)
class Formed:
    """An epoch that was formed, and is to be shown."""

    epoch: int  # its number
    workers: tuple[int, ...]  # its members by rank
    joined: list[Worker]  # those that were not members before
    record: Record  # It is that of the epoch before.
    at: float  # when it was formed

    def event(self) -> EpochFormed:
        """Return the event that shows it."""
        line = self.record.line(self.epoch, len(self.workers), self.joined, self.at)
        return EpochFormed(self.epoch, self.workers, line)
