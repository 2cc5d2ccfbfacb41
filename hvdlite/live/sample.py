"""What one rank says of itself once a second: one line of JSON.

Numbers that grow count from the beginning of the rank's engine, so that a lost line loses nothing.
Times are seconds on rank 0's monotonic clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

MOST_EVENTS = 64  # of one line


@dataclass(frozen=True)
class Event:
    """Something that happened, such as a stall.

    Attributes:
        time: when.
        kind: "stall", "nonfinite", "error", "process set", "tuned", "epoch", "diverged" or "late";
            of the launcher "worker", too.
        rank: whom it concerns, or -1.
        name: of the tensor or process set; may be empty.
        text: a sentence for people.
    """

    time: float
    kind: str
    rank: int
    name: str
    text: str


@dataclass(frozen=True)
class Stall:
    """A collective that waits for ranks.

    Attributes:
        name: of the collective.
        seconds: how long it has waited.
        submitted: the ranks that wait in it.
        missing: the ranks that it waits for.
    """

    name: str
    seconds: float
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class RankSteps:
    """Where the time of one rank went, as sums in seconds over all steps.

    Attributes:
        backward: from its first gradient to its last.
        waiting: from its last gradient until the last one of all ranks.
        communicating: from then until the reduced gradients were there; the same for all ranks.
        between: from then to its next first gradient: optimizer, data, forward.
        last: in how many steps it was the last.
        late_between: how late it was in these steps at its first gradient.
        late_backward: how much later it became in their backward passes.
    """

    backward: float
    waiting: float
    communicating: float
    between: float
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
    """One line.

    Attributes:
        rank: who says it.
        size: how many ranks there are.
        epoch: of the world, which an elastic job makes anew.
        host: the name of its host.
        pid: its process.
        time: when it was said.
        began: when its engine began.
        counters: of its engine, by name, such as "bytes".
        cpu: seconds of all its threads on processors.
        rss: bytes of memory.
        switches: how often a thread of it was taken off a processor.
        core_wait: seconds that its threads were ready to run and waited for a processor, added up;
            0 where the kernel does not tell.
        threads: how many it has.
        cores: how many its host lets it use.
        samples: what `hvd.observe(samples=)` has counted.
        values: the last value of each name given to `hvd.observe`.
        events: what happened since its line before.
        steps: where the time went; None on all ranks but rank 0.
        stalled: what waits, as rank 0 sees it.
    """

    rank: int
    size: int
    epoch: int
    host: str
    pid: int
    time: float
    began: float
    counters: dict[str, int]
    cpu: float = 0.0
    rss: int = 0
    switches: int = 0
    core_wait: float = 0.0
    threads: int = 0
    cores: int = 0
    samples: int = 0
    values: dict[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    steps: Steps | None = None
    stalled: tuple[Stall, ...] = ()

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
        """Decode a line.

        Raises:
            ValueError: it is not one.

        Example:
            >>> sample = Sample(1, 2, 0, "node1", 77, 12.5, 10.0, {"bytes": 400})
            >>> Sample.parse(sample.line()) == sample
            True
        """
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
    """Check the types of what a rank has written, which may be anything.

    Raises:
        ValueError: a field has another type, or a number that cannot be.
    """
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
