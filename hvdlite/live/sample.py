"""What one rank says of itself once a second: one line of JSON.

Numbers that grow count from the beginning of the rank's engine, so that a lost line loses nothing.
Times are seconds on rank 0's monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened, such as a stall."""

    time: float
    # "stall", "nonfinite", "error", "process set", "tuned", "world", "diverged" or "late"; an event
    # of the launcher is "worker".
    kind: str
    rank: int  # -1 for an event that does not concern one rank
    name: str  # of a tensor or process set, or empty
    text: str


@dataclass(frozen=True)
class Stall:
    """A collective that waits for ranks."""

    name: str
    seconds: float  # that it has waited
    submitted: tuple[int, ...]  # the ranks that wait in it
    missing: tuple[int, ...]  # the ranks that it waits for

    @classmethod
    def of(cls, name: str, seconds: float, submitted: Any, missing: Any) -> Stall:
        return cls(name, seconds, tuple(submitted), tuple(missing))


@dataclass(frozen=True)
class RankSteps:
    """Where the time of one rank went, as sums in seconds over all steps."""

    # A step goes from the rank's first gradient to its last, on to the last one of all ranks, on to
    # the reduced gradients (at the same time on all ranks), and on to the next first gradient
    # (optimizer, data, forward).
    backward: float
    waiting: float
    communicating: float
    between: float
    last: float  # in how many steps the rank was the last one
    late_between: float  # how late it was at its first gradient in these steps
    late_backward: float  # and how much later it became in backward
    held_up: float  # all others waited for this rank alone; steps without it are that much shorter


@dataclass(frozen=True)
class Steps:
    """The steps so far: how many, their time in seconds, and a row for each rank."""

    count: int
    seconds: float
    ranks: tuple[RankSteps, ...]

    @classmethod
    def of(cls, count: int, seconds: float, rows: Sequence[Sequence[float]]) -> Steps:
        return cls(count, seconds, tuple(RankSteps(*row) for row in rows))


@dataclass(frozen=True)
class Sample:
    """One line, which a rank writes."""

    rank: int
    size: int  # the number of ranks
    epoch: int  # An elastic job makes a new world in each epoch.
    host: str
    pid: int
    time: float  # when the rank said it
    began: float  # when its engine began
    counters: dict[str, int]  # those of its engine, such as "bytes"
    cpu: float = 0.0  # seconds that all its threads together ran on processors
    rss: int = 0  # bytes of memory
    switches: int = 0  # how often one of its threads was taken off a processor
    # Seconds that its threads were ready to run and waited for a processor, added up; 0 where the
    # kernel does not tell.
    core_wait: float = 0.0
    threads: int = 0
    cores: int = 0  # how many its host lets it use
    samples: int = 0  # as `hvd.observe(samples=)` has counted them
    values: dict[str, float] = field(default_factory=dict)  # the last ones of `hvd.observe`
    events: tuple[Event, ...] = ()  # since its line before
    steps: Steps | None = None  # Only rank 0 tells where the time went.
    stalled: tuple[Stall, ...] = ()  # Only rank 0 sees what waits.
    ended: bool = False  # The rank has left the world: no line follows.

    def line(self) -> bytes:
        """Encode it, with a line feed at its end."""
        told = {name: value for name, value in vars(self).items() if value not in (None, ())}
        if self.steps is not None:
            rows = [[round(x, 6) for x in vars(row).values()] for row in self.steps.ranks]
            told["steps"] = [self.steps.count, round(self.steps.seconds, 6), rows]
        for name in ("events", "stalled"):
            if name in told:
                told[name] = [list(vars(one).values()) for one in told[name]]
        return json.dumps(told, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Sample:
        """Decode a line; raise ValueError if it is not one: a script can write anything."""
        try:
            told: dict[str, Any] = json.loads(line)
            if "steps" in told:
                told["steps"] = Steps.of(*told["steps"])
            told["events"] = tuple(Event(*one) for one in told.get("events", ()))
            told["stalled"] = tuple(Stall.of(*one) for one in told.get("stalled", ()))
            sample = cls(**told)
            ranks = sample.size if sample.steps is None else len(sample.steps.ranks)
            if not (0 <= sample.rank < sample.size == ranks and sample.began <= sample.time):
                raise ValueError("this is not a sample: rank or time cannot be that")
            return sample
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"this is not a sample: {error}") from None
