"""Sums over a whole job that never fall, although each epoch and each process counts from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hvdlite.live.sample import Event, Sample

PHASES = ("backward", "waiting", "communicating", "between")


@dataclass
class Total:
    """A sum over the counters that succeed each other; each begins at 0."""

    _past: float = 0.0
    _now: float = 0.0

    def see(self, value: float, begins: bool) -> None:
        """Take the present value; `begins` says that it is the first one of another counter."""
        if begins or value < self._now:
            self._past += self._now
        self._now = value

    @property
    def value(self) -> float:
        """The sum."""
        return self._past + self._now


@dataclass
class Totals:
    """The sums of a job."""

    steps: Total = field(default_factory=Total)
    seconds: Total = field(default_factory=Total)  # The steps took so long.
    phases: dict[tuple[int, str], Total] = field(default_factory=dict)  # (rank, phase) has seconds.
    bytes: dict[int, Total] = field(default_factory=dict)  # The keys are ranks.
    # A process, (host, pid), keeps its number of samples in the next epoch.
    samples: dict[tuple[str, int], Total] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)  # The keys are kinds.
    _epochs: dict[int, int] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add a line of a rank, later than its lines before."""
        rank = sample.rank
        begins = self._epochs.get(rank, sample.epoch) != sample.epoch
        self._epochs[rank] = sample.epoch
        if "bytes" in sample.counters:
            self.bytes.setdefault(rank, Total()).see(sample.counters["bytes"], begins)
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
