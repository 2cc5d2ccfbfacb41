"""Sums over a whole job that never fall, although each epoch and each process counts from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hvdlite.live.sample import Event, Sample

PHASES = ("backward", "waiting", "communicating", "between")


@dataclass
class Total:
    """A sum over the counters that succeed each other, each of which begins at 0."""

    _past: float = 0.0
    _now: float = 0.0

    def see(self, value: float, begins: bool) -> None:
        """Take the present value of the present counter.

        Args:
            value: of the counter.
            begins: whether this is the first value of another counter than before.
        """
        if begins or value < self._now:
            self._past += self._now
        self._now = value

    @property
    def value(self) -> float:
        """The sum."""
        return self._past + self._now


@dataclass
class Totals:
    """The sums of a job.

    Attributes:
        steps: how many were completed.
        seconds: their time.
        phases: seconds by rank and phase.
        bytes: by rank.
        nonfinite: by rank, what HVDLITE_CHECK_FINITE has found.
        samples: by process, which keeps its number of samples in the next epoch: host and pid.
        events: how many by kind.
    """

    steps: Total = field(default_factory=Total)
    seconds: Total = field(default_factory=Total)
    phases: dict[tuple[int, str], Total] = field(default_factory=dict)
    bytes: dict[int, Total] = field(default_factory=dict)
    nonfinite: dict[int, Total] = field(default_factory=dict)
    samples: dict[tuple[str, int], Total] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    _epochs: dict[int, int] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add a line of a rank, later than its lines before."""
        rank = sample.rank
        begins = self._epochs.get(rank, sample.epoch) != sample.epoch
        self._epochs[rank] = sample.epoch
        for name, totals in (("bytes", self.bytes), ("nonfinite", self.nonfinite)):
            if name in sample.counters:
                totals.setdefault(rank, Total()).see(sample.counters[name], begins)
        self.samples.setdefault((sample.host, sample.pid), Total()).see(sample.samples, False)
        self.count(sample.events)
        if sample.steps is None:
            return
        self.steps.see(sample.steps.count, begins)
        self.seconds.see(sample.steps.seconds, begins)
        for number, row in enumerate(sample.steps.ranks):
            for phase in PHASES:
                total = self.phases.setdefault((number, phase), Total())
                total.see(getattr(row, phase), begins)

    def count(self, events: Iterable[Event]) -> None:
        """Count events by their kind."""
        self.events.update(event.kind for event in events)
