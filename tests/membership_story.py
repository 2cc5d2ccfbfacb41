"""A Membership driven by hand, for tests that tell one story each."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdlite.launch.elastic.membership import Membership
from hvdlite.launch.elastic.messages import Action, Limits, Send
from hvdlite.launch.elastic.state import Phase

T = TypeVar("T")


class Story:
    """Drives a Membership by hand; `sent` and `events` have what it answered."""

    def __init__(self, np: int, **limits: Any) -> None:
        self.membership = Membership(Limits(np, **{"min_np": 1, **limits}))
        self.now = 0.0
        self.sent: dict[int, list[dict[str, Any]]] = {}
        self.events: list[Action] = []
        self.heard: dict[int, int] = {}
        for worker in range(np):
            self.expect(worker, joiner=False)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(action.worker, []).append(action.message)
                if action.message["kind"] == "gather":
                    self.heard[action.worker] = action.message["epoch"]
            else:
                self.events.append(action)

    def expect(self, worker: int, joiner: bool = True) -> None:
        self.take(self.membership.expect(worker, "ab"[joiner], joiner, self.now))

    def dies(self, worker: int, why: str = "died of SIGKILL") -> None:
        self.take(self.membership.ended(worker, why, False, self.now))

    def ends(self, worker: int, status: int = 0) -> None:
        self.take(self.membership.ended(worker, f"exit status {status}", not status, self.now))

    def says(self, number: int, kind: str, **fields: Any) -> None:
        self.take(self.membership.received(number, {"kind": kind, **fields}, self.now))

    def ready(
        self, worker: int, why: str, commits: int | dict[str, int] = 0, **fields: Any
    ) -> None:
        message: dict[str, Any] = {
            "epoch": self.membership._formed,
            "why": why,
            "endpoint": {"port": worker, "agreed": {"fusion": "64"}},
            "commits": commits if isinstance(commits, dict) else {"0": commits},
            "stuck": None,
            "suspect": None,
            "reason": "",
            "restored": False,
            "heard": self.heard.get(worker, -1),
            "synced": True,
        }
        self.says(worker, "ready", **{**message, **fields})

    def connected(self, *workers: int) -> None:
        for worker in workers:
            self.says(worker, "connected", epoch=self.membership.epoch, clock=worker)

    def waits(self, seconds: float) -> None:
        """Let time pass, with every tick that is asked for."""
        end = self.now + seconds
        while (at := self.membership.wake_at()) is not None and at <= end:
            assert at > self.now
            self.now = at
            self.take(self.membership.tick(at))
        self.now = end
        self.take(self.membership.tick(end))

    def kinds(self, worker: int) -> list[str]:
        """Take what was sent to a worker, by kind."""
        return [message["kind"] for message in self.sent.pop(worker, [])]

    def last(self, worker: int, kind: str) -> dict[str, Any]:
        """Take what was sent to a worker, and return the last message, which is of this kind."""
        message = self.sent.pop(worker)[-1]
        assert message["kind"] == kind, message
        return message

    def only(self, worker: int, kind: str) -> dict[str, Any]:
        """Take what was sent to a worker, and return the only message of this kind."""
        (message,) = [one for one in self.sent.pop(worker) if one["kind"] == kind]
        return message

    def event(self, kind: type[T]) -> T:
        """Take all events, and return the only one of this kind."""
        events, self.events = self.events, []
        (found,) = [event for event in events if isinstance(event, kind)]
        return found

    def none_of(self, kind: type) -> bool:
        return not any(isinstance(event, kind) for event in self.events)

    @property
    def phase(self) -> Phase:
        return self.membership.phase

    @property
    def numbers(self) -> list[int]:
        return [worker.number for worker in self.membership.members]


def formed(np: int, in_run: bool = True, **limits: Any) -> Story:
    """Bring a job to its first epoch, and into `run`."""
    story = Story(np, **limits)
    for worker in range(np):
        story.ready(worker, "start")
    story.connected(*range(np))
    if in_run:
        at_boundary(story, *range(np))
        assert all(story.kinds(worker)[-1] == "continue" for worker in range(np))
        story.events.clear()
    return story


def at_boundary(story: Story, *workers: int, **fields: Any) -> None:
    for worker in workers:
        story.ready(worker, "boundary", **fields)


def lost(story: Story, *workers: int, **fields: Any) -> None:
    for worker in workers:
        story.ready(worker, "lost", **fields)
