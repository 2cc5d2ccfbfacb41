"""A running job, as far as the samples of its ranks tell: `Run`, and `Figures` of a span of time.

The screen, the findings and the report all read these, and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hvdlite.live.sample import Event, RankSteps, Sample, Stall, Steps

_RECENT = 128  # samples of each rank that are kept as they came
_POINTS = 600  # samples of each rank's history
_EVENTS = 1000
_SILENCE = 3.0  # seconds without a line after which a rank is called silent


@dataclass(frozen=True)
class RankFigures(RankSteps):
    """One rank in a span of time: its `RankSteps` are means of one step.

    `last` is the share of the steps in which the rank was the last, from 0 to 1, and how late it
    was is a mean over these.
    """

    rank: int
    host: str
    cpu: float  # processors that it used, as a mean; 1.0 is one core
    rss: int  # bytes of memory
    switches: float  # how often a second one of its threads was taken off a processor
    threads: int
    cores: int  # how many its host lets it use
    samples: float  # a second
    values: dict[str, float]  # the last ones given to `hvd.observe`
    silent: float  # seconds since its last line; 0 if that is not too long
    # How many of its threads were ready to run and waited for a processor, as a mean; and seconds a
    # step in the exchange of gradients. Each is 0 where nobody tells.
    core_wait: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True)
class Figures:
    """A job in a span of time."""

    seconds: float  # of the span
    epoch: int
    size: int  # the number of ranks
    steps: int  # completed in the span
    step: float  # the mean time of a step in seconds; 0 without steps
    samples: float  # of all ranks a second; 0 where nobody calls `hvd.observe(samples=)`
    bytes_per_step: float  # that one rank gives to collectives
    ranks: tuple[RankFigures, ...]  # those that have said something
    stalled: tuple[Stall, ...]
    total_steps: int  # completed since the job began
    events: tuple[Event, ...] = ()  # "nonfinite" and "diverged" of the span

    @property
    def rate(self) -> float:
        """Steps per second."""
        return 1 / self.step if self.step else 0.0

    @property
    def bytes(self) -> float:
        """Bytes a second that one rank gives to collectives."""
        return self.bytes_per_step * self.rate


class _History:
    """The samples of one rank: the last ones as they came, and some of all of them."""

    def __init__(self) -> None:
        self.recent: deque[Sample] = deque(maxlen=_RECENT)
        self.points: list[Sample] = []
        self.heard = 0.0
        self._apart = 0.0  # seconds between two points

    def add(self, sample: Sample, now: float) -> None:
        self.heard = now
        self.recent.append(sample)
        if not self.points or sample.time - self.points[-1].time >= self._apart:
            self.points.append(sample)
        if len(self.points) > _POINTS:
            self.points = self.points[::2]
            self._apart = 2 * (self.points[-1].time - self.points[0].time) / _POINTS

    def span(self, seconds: float) -> _Span:
        """Return the span of so many seconds that ends now, or of all time if that is shorter."""
        last = self.recent[-1]
        oldest = self.recent[0].time
        before = [point for point in self.points if point.time < oldest]
        for sample in reversed((*before, *self.recent)):
            if last.time - sample.time >= seconds:
                return _Span(sample, last, sample)
        return _Span(None, last, self.points[0])


class Run:
    """All that is known of a job. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _History] = {}
        self._epoch = 0
        self._past_steps = 0  # those of earlier epochs
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self.lost = 0  # lines that could not be read; counted by the thread that reads them

    def add(self, sample: Sample, now: float) -> None:
        """Add what a rank said; `now` is a monotonic time of this process in seconds."""
        with self._lock:
            if sample.epoch < self._epoch:
                return  # It comes from a world that has ended.
            if sample.epoch > self._epoch:
                last = (one.recent[-1] for one in self._ranks.values())
                self._past_steps += max(map(_count, last), default=0)
                self._ranks, self._epoch = {}, sample.epoch
            self._ranks.setdefault(sample.rank, _History()).add(sample, now)
            self._events.extend(sample.events)

    def note(self, event: Event) -> None:
        """Add what the launcher has seen."""
        with self._lock:
            self._events.append(event)

    def events(self) -> list[Event]:
        """Return the last events, the oldest first."""
        with self._lock:
            return list(self._events)

    def latest(self) -> list[Sample]:
        """Return the last sample of each rank, by rank."""
        with self._lock:
            return [self._ranks[rank].recent[-1] for rank in sorted(self._ranks)]

    def history(self) -> dict[int, list[Sample]]:
        """Return, by rank, some hundreds of samples from the beginning of the epoch to now."""
        with self._lock:
            return {rank: list(one.points) for rank, one in sorted(self._ranks.items())}

    def figures(self, seconds: float, now: float) -> Figures | None:
        """Return what the job did in its last seconds; None before its first line.

        With `math.inf` the span is the whole epoch. `now` is a monotonic time of this process in
        seconds.
        """
        with self._lock:
            if not self._ranks:
                return None
            spans = {rank: one.span(seconds) for rank, one in sorted(self._ranks.items())}
            silence = {rank: now - one.heard for rank, one in self._ranks.items()}
            figures = _figures(spans, silence, self._past_steps)
            begin = min(span.last.time - span.seconds for span in spans.values())
            faults = (one for one in self._events if one.kind in ("nonfinite", "diverged"))
            return replace(figures, events=tuple(one for one in faults if one.time >= begin))


@dataclass(frozen=True)
class _Span:
    first: Sample | None  # at the beginning; None where the span begins with the engine
    last: Sample
    oldest: Sample  # the first in the span: the process counted before its engine began

    @property
    def seconds(self) -> float:
        return max(1e-9, self.last.time - (self.first.time if self.first else self.last.began))

    def grown(self, read: Callable[[Sample], float]) -> float:
        """Return by how much a number of the engine has grown."""
        return read(self.last) - (read(self.first) if self.first else 0)

    def steps(self) -> Steps:
        """Return the steps of the span, without means; none if this rank does not tell them."""
        last, first = self.last.steps, self.first.steps if self.first is not None else None
        if last is None or first is None:
            return last or Steps(0, 0.0, ())
        ranks = tuple(
            RankSteps(*(b - a for a, b in zip(*(vars(row).values() for row in rows), strict=True)))
            for rows in zip(first.ranks, last.ranks, strict=True)
        )
        return Steps(last.count - first.count, last.seconds - first.seconds, ranks)

    def per_second(self, read: Callable[[Sample], float]) -> float:
        """Return how much a second a number of the process has grown."""
        return (read(self.last) - read(self.oldest)) / max(1e-9, self.last.time - self.oldest.time)


def _figures(spans: dict[int, _Span], silence: dict[int, float], past_steps: int) -> Figures:
    # One rank, mostly rank 0, tells the steps of all.
    told = next((one for one in spans.values() if one.last.steps), next(iter(spans.values())))
    sums = told.steps()
    count = max(1, sums.count)
    step = sums.seconds / count
    ranks = tuple(
        _rank_figures(span, _means(sums, rank), silence[rank], step) for rank, span in spans.items()
    )
    return Figures(
        seconds=told.seconds,
        epoch=told.last.epoch,
        size=told.last.size,
        steps=sums.count,
        step=step,
        samples=sum(rank.samples for rank in ranks),
        bytes_per_step=told.grown(lambda sample: sample.counters.get("bytes", 0)) / count,
        ranks=ranks,
        stalled=told.last.stalled,
        total_steps=past_steps + _count(told.last),
    )


def _count(sample: Sample) -> int:
    return sample.steps.count if sample.steps is not None else 0


def _means(sums: Steps, rank: int) -> RankSteps:
    """Return means of one rank; how late it was is a mean over the steps in which it was last."""
    if not sums.count or rank >= len(sums.ranks):  # Its process group may be another one.
        return _NO_STEPS
    mean = RankSteps(*(value / sums.count for value in vars(sums.ranks[rank]).values()))
    share = mean.last or 1.0
    late_between, late_backward = mean.late_between / share, mean.late_backward / share
    return replace(mean, late_between=late_between, late_backward=late_backward)


_NO_STEPS = RankSteps(0, 0, 0, 0, 0, 0, 0, 0)


def _rank_figures(span: _Span, phases: RankSteps, silence: float, step: float) -> RankFigures:
    last = span.last
    exchanged = span.per_second(lambda sample: sample.counters.get("exchange_us", 0))
    return RankFigures(
        rank=last.rank,
        host=last.host,
        **vars(phases),
        cpu=span.per_second(lambda sample: sample.cpu),
        rss=last.rss,
        switches=span.per_second(lambda sample: sample.switches),
        core_wait=span.per_second(lambda sample: sample.core_wait),
        exchange=step * 1e-6 * exchanged,
        threads=last.threads,
        cores=last.cores,
        samples=span.per_second(lambda sample: sample.samples),
        values=last.values,
        silent=silence if silence > _SILENCE and not last.ended else 0.0,
    )


@dataclass(frozen=True)
class About:
    """What the launcher knows of a job from its start."""

    command: tuple[str, ...]  # the program of every rank, with its arguments
    ranks: int  # how many there are at the start
    hosts: tuple[str, ...]  # those of the start, each once
    began: float  # in seconds since 1970

    @property
    def program(self) -> str:
        words = [word.rpartition("/")[2] for word in self.command]
        scripts = [word for word in words if word.endswith(".py")]
        modules = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "-m"]
        return (scripts or modules or words or ["?"])[0]


@dataclass(frozen=True)
class End:
    status: int  # the launcher's exit status
    why: str  # the first failure in words; empty if there was none


class Viewer(Protocol):
    """Shows a job. If it raises, the launcher prints a line, and the job goes on without it."""

    # The launcher's thread calls both methods once, and the ranks wait for both. A viewer that has
    # to do something in between has a thread of its own, which only reads the run.

    def start(self, run: Run, about: About) -> None:
        """Begin to show a job; called before its ranks start."""

    def stop(self, end: End) -> None:
        """End; called when the ranks have ended and the launcher has shown why."""
