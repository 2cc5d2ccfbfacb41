"""What `membership_model` knows of a worker, and of an epoch's data plane."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class World:
    """One epoch's data plane."""

    epoch: int
    members: tuple[int, ...]
    mode: str
    entered: dict[int, dict[int, int]] = field(default_factory=dict)  # operation, worker, notice
    broken: bool = False

    def executed(self, operation: int) -> bool:
        return len(self.entered.get(operation, ())) == len(self.members)

    def result(self, operation: int) -> int:
        return max(self.entered[operation].values())


@dataclass
class Model:
    """One worker."""

    number: int
    joiner: bool
    alive: bool = True
    script: str = "new"  # new, init, training, boundary, done
    world: World | None = None  # of its engine; kept while suspended, for what is held
    suspended: bool = False
    connecting: dict[str, Any] | None = None
    connected: int = -1  # the epoch for which it said so
    epoch: int = -1
    commits: int = 0
    entered: bool = False  # the operation commits + 1
    state: Any = None  # of the training; comparable
    saved: Any = None
    restored: bool = False
    raising: bool = False
    notice: int = 0
    acted: int = 0  # the newest notice that was acted on, at a boundary
    at_end: bool = False  # the script goes to a boundary next
    in_run: bool = False
    heard: int = -1
    synced: bool = False
    inbox: deque[dict[str, Any]] = field(default_factory=deque)
    outbox: deque[dict[str, Any]] = field(default_factory=deque)
    hung_up: bool = False  # the registrar has seen the end of its connection

    def ready(self, why: str) -> dict[str, Any]:
        return {
            "kind": "ready",
            "epoch": self.epoch,
            "why": why,
            "heard": self.heard,
            "synced": self.synced,
            "endpoint": {"number": self.number},
            "commits": {"0": self.commits} if self.epoch >= 0 else {},
            "stuck": None,
            "suspect": None,
            "reason": "the link broke" if why == "lost" else "",
            "restored": self.restored,
        }
