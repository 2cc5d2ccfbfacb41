"""A running job, as far as the samples of its ranks tell: `Run`, and `Figures` of a span of time.

The screen, the findings and the report all read these, and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from hvdlite.live.sample import Event, RankSteps, Sample, Stall

_RECENT = 128  # So many samples of each rank are kept as they came.
_POINTS = 600  # Each rank's history has so many points.
_EVENTS = 1000
_SILENCE = 3.0  # seconds without a line after which a rank is called silent


@dataclass(frozen=True)
class RankFigures:
    """One rank in a span of time. All times are means of one step, in seconds."""

    rank: int
    host: str
    # A step goes from the rank's first gradient to its last, on to the last one of all ranks, on to
    # the reduced gradients, and on to the next first gradient (optimizer, data, forward).
    backward: float
    waiting: float
    communicating: float
    between: float
    # The rank was the last in this share of the steps, from 0 to 1. In these steps it was so late
    # at its first gradient, and became so much later in backward.
    last: float
    late_between: float
    late_backward: float
    cpu: float  # It used so many processors, as a mean; 1.0 is one core.
    rss: int  # It has so many bytes of memory.
    switches: float  # So often a second one of its threads was taken off a processor.
    threads: int
    cores: int  # Its host lets it use so many.
    samples: float  # It trained on so many per second.
    values: dict[str, float]  # These are the last values given to `hvd.observe`.
    silent: float  # Its last line came so many seconds ago; 0 if that is not too long.
    # So many of its threads were ready to run and waited for a processor, as a mean; 0 where the
    # kernel or an older record does not tell.
    core_wait: float = 0.0
    # Its own time in the exchange of gradients, in seconds a step, is 0 where an older record does
    # not tell.
    exchange: float = 0.0


@dataclass(frozen=True)
class Figures:
    """A job in a span of time."""

    seconds: float  # The span is so long.
    epoch: int
    size: int  # There are so many ranks.
    steps: int  # So many steps were completed in the span.
    step: float  # The mean time of a step is in seconds; it is 0 without steps.
    # All ranks together train on so many per second; 0 where nobody calls `hvd.observe(samples=)`.
    samples: float
    bytes_per_step: float  # One rank gives so many bytes to collectives in a step.
    ranks: tuple[RankFigures, ...]  # Only ranks that have said something are here.
    stalled: tuple[Stall, ...]
    total_steps: int  # So many steps were completed since the job began.
    samples_per_step: float = 0.0  # It is of all ranks; 0 where nobody calls `hvd.observe`.
    events: tuple[Event, ...] = ()  # These are "nonfinite" and "diverged" of the span.

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
        self._past_steps = 0  # Earlier epochs had so many.
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._lost = 0

    def add(self, sample: Sample, now: float) -> None:
        """Add what a rank said; `now` is a monotonic time of this process in seconds."""
        with self._lock:
            if sample.epoch < self._epoch:
                return  # It comes from a world that has ended.
            if sample.epoch > self._epoch:
                self._begin(sample.epoch)
            self._ranks.setdefault(sample.rank, _History()).add(sample, now)
            self._events.extend(sample.events)

    def note(self, event: Event) -> None:
        """Add what the launcher has seen."""
        with self._lock:
            self._events.append(event)

    def lose(self) -> None:
        """Count a line that could not be read."""
        with self._lock:
            self._lost += 1

    @property
    def lost(self) -> int:
        """How many lines could not be read."""
        return self._lost

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
        # What happened between two of them is the difference of their numbers.
        with self._lock:
            return {rank: list(one.points) for rank, one in sorted(self._ranks.items())}

    def figures(self, seconds: float, now: float) -> Figures | None:
        """Return what the job did in its last seconds; None before its first line."""
        # With `math.inf` the span is the whole epoch. `now` is a monotonic time of this process in
        # seconds.
        with self._lock:
            if not self._ranks:
                return None
            spans = {rank: one.span(seconds) for rank, one in sorted(self._ranks.items())}
            silence = {rank: now - one.heard for rank, one in self._ranks.items()}
            figures = _figures(spans, silence, self._past_steps)
            begin = min(span.last.time - span.seconds for span in spans.values())
            return replace(figures, events=tuple(_faults(self._events, begin)))

    def _begin(self, epoch: int) -> None:
        self._past_steps += _steps(one.recent[-1] for one in self._ranks.values())
        self._ranks = {}
        self._epoch = epoch


@dataclass(frozen=True)
class _Span:
    """A span of one rank."""

    first: Sample | None  # It is at the beginning; None where the span begins with the engine.
    last: Sample
    oldest: Sample  # It is the first in the span: the process counted before its engine began.

    @property
    def seconds(self) -> float:
        return max(1e-9, self.last.time - (self.first.time if self.first else self.last.began))

    def grown(self, read: Callable[[Sample], float]) -> float:
        """Return by how much a number has grown."""
        return read(self.last) - (read(self.first) if self.first else 0)

    def per_second(self, read: Callable[[Sample], float]) -> float:
        """Return how much a second a number of the process has grown."""
        return (read(self.last) - read(self.oldest)) / max(1e-9, self.last.time - self.oldest.time)


def _steps(samples: Iterable[Sample]) -> int:
    return max((one.steps.count for one in samples if one.steps is not None), default=0)


def _figures(spans: dict[int, _Span], silence: dict[int, float], past_steps: int) -> Figures:
    one = next((one for one in spans.values() if one.last.steps is not None), None)
    steps = 0 if one is None else round(one.grown(lambda sample: _steps([sample])))
    seconds = 0.0 if one is None else one.grown(_seconds_of_steps)
    phases = _phases(one, steps)
    ranks = tuple(
        _rank_figures(span, phases.get(rank, _NO_STEPS), silence[rank], seconds / max(1, steps))
        for rank, span in spans.items()
    )
    any_span = one or next(iter(spans.values()))
    return Figures(
        seconds=any_span.seconds,
        epoch=any_span.last.epoch,
        size=any_span.last.size,
        steps=steps,
        step=seconds / steps if steps else 0.0,
        samples=sum(rank.samples for rank in ranks),
        bytes_per_step=_bytes_per_step(one),
        ranks=ranks,
        stalled=any_span.last.stalled,
        total_steps=past_steps + _steps([any_span.last]),
        samples_per_step=_samples_per_step(one, ranks),
    )


def _faults(events: Iterable[Event], begin: float) -> Iterable[Event]:
    return (one for one in events if one.kind in ("nonfinite", "diverged") and one.time >= begin)


def _bytes_per_step(span: _Span | None) -> float:
    """Return what a rank gives in a step; what it gives before the first one counts if need be."""
    if span is None:
        return 0.0
    first = span.oldest if 0 < _steps([span.oldest]) < _steps([span.last]) else None
    own = _Span(first, span.last, span.oldest)
    steps = own.grown(lambda sample: _steps([sample]))
    return own.grown(lambda sample: sample.counters.get("bytes", 0)) / steps if steps else 0.0


def _samples_per_step(span: _Span | None, ranks: Iterable[RankFigures]) -> float:
    """Return the samples of all ranks in a step: one rank's own, scaled by the ranks' rates."""
    # The rank that counts steps says both numbers in one line, so that time without steps, such as
    # the start of a job, does not count.
    if span is None:
        return 0.0
    steps = _steps([span.last]) - _steps([span.oldest])
    rates = {rank.rank: rank.samples for rank in ranks}
    own = rates[span.last.rank]
    if steps <= 0 or not own:
        return 0.0
    return (span.last.samples - span.oldest.samples) / steps * sum(rates.values()) / own


_NO_STEPS = RankSteps(0, 0, 0, 0, 0, 0, 0)


def _seconds_of_steps(sample: Sample) -> float:
    return sample.steps.seconds if sample.steps is not None else 0.0


def _phases(span: _Span | None, steps: int) -> dict[int, RankSteps]:
    """Return means over the steps of the span, by rank."""
    if span is None or span.last.steps is None or not steps:
        return {}
    last = [list(vars(row).values()) for row in span.last.steps.ranks]
    first = [[0.0] * len(row) for row in last]
    if span.first is not None and span.first.steps is not None:
        first = [list(vars(row).values()) for row in span.first.steps.ranks]
    return {
        rank: _mean(begin, end, steps)
        for rank, (begin, end) in enumerate(zip(first, last, strict=True))
    }


def _mean(begin: list[float], end: list[float], steps: int) -> RankSteps:
    """Return means of one rank; how late it was is a mean over the steps in which it was last."""
    mean = [(b - a) / steps for a, b in zip(begin, end, strict=True)]
    backward, waiting, communicating, between, last, late_between, late_backward = mean
    share = last or 1.0
    return RankSteps(
        backward,
        waiting,
        communicating,
        between,
        last,
        late_between / share,
        late_backward / share,
    )


def _rank_figures(span: _Span, phases: RankSteps, silence: float, step: float) -> RankFigures:
    last = span.last
    return RankFigures(
        rank=last.rank,
        host=last.host,
        **vars(phases),
        cpu=span.per_second(lambda sample: sample.cpu),
        rss=last.rss,
        switches=span.per_second(lambda sample: sample.switches),
        core_wait=span.per_second(lambda sample: sample.core_wait),
        exchange=step
        * 1e-6
        * span.per_second(lambda sample: sample.counters.get("exchange_us", 0)),
        threads=last.threads,
        cores=last.cores,
        samples=span.per_second(lambda sample: sample.samples),
        values=last.values,
        silent=silence if silence > _SILENCE and not last.ended else 0.0,
    )


@dataclass(frozen=True)
class About:
    """What the launcher knows of a job from its start."""

    command: tuple[str, ...]  # Every rank runs this program with these arguments.
    ranks: int  # There are so many at the start.
    hosts: tuple[str, ...]  # Each host of the start is here once.
    began: float  # The job was started at this time, in seconds since 1970.

    @property
    def program(self) -> str:
        """The name of the script or program, for headings."""
        words = [word.rpartition("/")[2] for word in self.command]
        scripts = [word for word in words if word.endswith(".py")]
        modules = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "-m"]
        return (scripts or modules or words or ["?"])[0]


@dataclass(frozen=True)
class End:
    """How a job has ended."""

    status: int  # The launcher ends with this exit status.
    why: str  # It tells the first failure in words; it is empty if there was none.


class Viewer(Protocol):
    """Shows a job. If it raises, the launcher prints a line, and the job goes on without it."""

    # The launcher's thread calls both methods once, and the ranks wait for both. A viewer that has
    # to do something in between has a thread of its own, which only reads the run.

    def start(self, run: Run, about: About) -> None:
        """Begin to show a job; called before its ranks start."""

    def stop(self, end: End) -> None:
        """End; called when the ranks have ended and the launcher has shown why."""
