"""What one rank says of itself once a second: one line of JSON.

Numbers that grow count from the beginning of the rank's engine, so that a lost line loses nothing.
Times are seconds on rank 0's monotonic clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

MOST_EVENTS = 64  # One line has at most so many.


@dataclass(frozen=True)
class Event:
    """Something that happened, such as a stall."""

    time: float
    # It is "stall", "nonfinite", "error", "process set", "tuned", "epoch", "diverged" or "late"; an
    # event of the launcher is "worker".
    kind: str
    rank: int  # It is -1 for an event that does not concern one rank.
    name: str  # It names a tensor or process set, or is empty.
    text: str


@dataclass(frozen=True)
class Stall:
    """A collective that waits for ranks."""

    name: str
    seconds: float  # It has waited so long.
    submitted: tuple[int, ...]  # These ranks wait in it.
    missing: tuple[int, ...]  # It waits for these ranks.


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
    # The rank was the last in so many steps. In these steps it was so late at its first gradient,
    # and became so much later in backward.
    last: float
    late_between: float
    late_backward: float


@dataclass(frozen=True)
class Steps:
    """The steps so far: how many, their time in seconds, and a row for each rank."""

    count: int
    seconds: float
    ranks: tuple[RankSteps, ...]


@dataclass(frozen=True)
class Sample:
    """One line, which a rank writes."""

    rank: int
    size: int  # There are so many ranks.
    epoch: int  # An elastic job makes a new world in each epoch.
    host: str
    pid: int
    time: float  # The rank said it at this time.
    began: float  # Its engine began at this time.
    counters: dict[str, int]  # Its engine counts these by name, such as "bytes".
    cpu: float = 0.0  # All its threads together ran so many seconds on processors.
    rss: int = 0  # It has so many bytes of memory.
    switches: int = 0  # So often one of its threads was taken off a processor.
    # Its threads were ready to run and waited so many seconds for a processor, added up; 0 where
    # the kernel does not tell.
    core_wait: float = 0.0
    threads: int = 0
    cores: int = 0  # Its host lets it use so many.
    samples: int = 0  # `hvd.observe(samples=)` has counted so many.
    values: dict[str, float] = field(default_factory=dict)  # `hvd.observe` got these last.
    events: tuple[Event, ...] = ()  # These happened since its line before.
    steps: Steps | None = None  # Only rank 0 tells where the time went.
    stalled: tuple[Stall, ...] = ()  # Rank 0 sees these wait.
    ended: bool = False  # The rank has left the world: no line follows.

    def line(self) -> bytes:
        """Encode it, with a line feed at its end."""
        fields = {name: value for name, value in vars(self).items() if value not in (None, ())}
        if self.steps is not None:
            rows = [[round(x, 6) for x in vars(row).values()] for row in self.steps.ranks]
            fields["steps"] = [self.steps.count, round(self.steps.seconds, 6), rows]
        for name in ("events", "stalled"):
            if name in fields:
                fields[name] = [list(vars(one).values()) for one in fields[name]]
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Sample:
        """Decode a line; raise ValueError if it is not one."""
        try:
            fields: dict[str, Any] = json.loads(line)
            _check(fields)
            if "steps" in fields:
                count, seconds, rows = fields["steps"]
                fields["steps"] = Steps(count, seconds, tuple(RankSteps(*row) for row in rows))
            fields["events"] = tuple(Event(*one) for one in fields.get("events", ()))
            fields["stalled"] = tuple(
                Stall(name, seconds, tuple(submitted), tuple(missing))
                for name, seconds, submitted, missing in fields.get("stalled", ())
            )
            return cls(**fields)
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"this is not a sample: {error}") from None


_WHOLE = ("rank", "size", "epoch", "pid", "rss", "switches", "threads", "cores", "samples")
_MOST = 1 << 62


def _check(fields: dict[str, Any]) -> None:
    """Raise ValueError for a wrong type or number: what a rank has written may be anything."""
    numbers = [fields.get(name, 0) for name in ("time", "began", "cpu", "core_wait")]
    for name in _WHOLE:
        _demand(type(fields.get(name, 0)) is int, name)
        numbers.append(fields.get(name, 0))
    _demand(0 <= fields.get("rank", 0) < fields.get("size", 1), "rank")
    counters, values = fields.get("counters", {}), fields.get("values", {})
    _demand(isinstance(counters, dict) and isinstance(values, dict), "counters")
    numbers += counters.values()
    _demand(all(type(value) in (int, float) for value in values.values()), "values")
    _demand(isinstance(fields.get("host", ""), str), "host")
    _demand(type(fields.get("ended", False)) is bool, "ended")
    for time, *words in fields.get("events", ()):
        numbers += time, words[1]
        _demand(all(isinstance(word, str) for word in (words[0], *words[2:])), "events")
    for name, seconds, submitted, missing in fields.get("stalled", ()):
        numbers += seconds, *submitted, *missing
        _demand(isinstance(name, str), "stalled")
    if "steps" in fields:
        count, seconds, rows = fields["steps"]
        numbers += count, seconds, *(number for row in rows for number in row)
        _demand(len(rows) == fields.get("size"), "steps")
    for number in numbers:
        _demand(type(number) in (int, float) and abs(number) < _MOST, "a number")
        _demand(math.isfinite(number), "a number")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"this is not a sample: {what} cannot be that")
