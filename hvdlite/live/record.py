"""What a report tells of a job: `Record`, and the JSON file beside the report."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvdlite.errors import ArgumentError
from hvdlite.live.findings import FEWEST_STEPS, Finding, find
from hvdlite.live.run import About, End, Figures, RankFigures, Run
from hvdlite.live.sample import Event, Sample, Stall

_VERSION = 1
_SPAN = 60.0  # seconds that the figures of a job that runs are about
_F = TypeVar("_F", Figures, RankFigures)


@dataclass(frozen=True)
class Record:
    """A job that runs or has ended."""

    about: About
    end: End | None  # None while the job runs.
    seconds: float  # The job has run so long.
    # They are of the last minute while the job runs. At its end they are of the last epoch, without
    # the first second in which there were steps, unless that second has most of them. None where no
    # rank has said anything.
    figures: Figures | None
    baseline: Figures | None
    findings: list[Finding]  # It is empty without figures.
    events: list[Event]  # The last ones are kept, the oldest first.
    history: dict[int, list[Sample]]  # By rank, it has some hundreds of samples of the last epoch.
    lost: int  # So many lines of the ranks could not be read.

    @classmethod
    def of(
        cls,
        run: Run,
        about: About,
        end: End | None,
        now: float,
        seconds: float,
        baseline: Figures | None,
    ) -> Record:
        """Take what is to be kept of a run; `now` is a monotonic time of this process."""
        figures = run.figures(_SPAN, now) if end is None else _figures_of(run, now)
        if figures is not None and end is not None and not end.status:
            # A rank that ended before the others did is not silent.
            ranks = tuple(dataclasses.replace(rank, silent=0.0) for rank in figures.ranks)
            figures = dataclasses.replace(figures, ranks=ranks)
        findings = [] if figures is None else find(figures, baseline)
        events = sorted(run.events(), key=lambda event: event.time)
        return cls(
            about, end, seconds, figures, baseline, findings, events, run.history(), run.lost
        )

    @property
    def origin(self) -> float:
        """The time of the ranks' clock from which a report counts."""
        times = [sample.began for points in self.history.values() for sample in points[:1]]
        return min(times + [event.time for event in self.events], default=0.0)

    def to_json(self) -> str:
        """Encode it; `read_baseline` reads the figures again."""
        history = [_row(sample) for points in self.history.values() for sample in points]
        fields = {
            "hvdlite_report": _VERSION,
            "about": dataclasses.asdict(self.about),
            "end": None if self.end is None else dataclasses.asdict(self.end),
            "seconds": self.seconds,
            "figures": None if self.figures is None else dataclasses.asdict(self.figures),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "events": [dataclasses.asdict(event) for event in self.events],
            "history": {"columns": _COLUMNS, "rows": history},
            "lost": self.lost,
        }
        return json.dumps(_finite(fields), allow_nan=False, separators=(",", ":")) + "\n"


def _figures_of(run: Run, now: float) -> Figures | None:
    """Return the figures of the last epoch, without its warm-up where it is long enough."""
    # In its first steps a process imports, compiles and fills caches, which says nothing of the
    # rest.
    whole = run.figures(math.inf, now)
    clock = [(one.time, one.steps.count) for one in run.history().get(0, []) if one.steps]
    warm = next(((time, count) for time, count in clock if count), None)
    if whole is None or warm is None or clock[-1][1] - warm[1] < warm[1]:
        return whole
    steady = run.figures(clock[-1][0] - warm[0], now)
    return None if steady is None else dataclasses.replace(steady, events=whole.events)


_COLUMNS = ("rank", "time", "samples", "bytes", "cpu", "steps", "step_seconds")


def _row(sample: Sample) -> tuple[float, ...]:
    steps = (sample.steps.count, sample.steps.seconds) if sample.steps is not None else (0, 0)
    moved = sample.counters.get("bytes", 0)
    return (sample.rank, sample.time, sample.samples, moved, sample.cpu, *steps)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, such as a loss that is NaN, by None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_baseline(path: Path) -> Figures:
    """Read the figures of a job from the JSON file beside its report; or raise ArgumentError."""
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"--baseline {path}: {error.strerror}") from None
    except ValueError:
        fields = None
    version = fields.get("hvdlite_report") if isinstance(fields, dict) else None
    if version is None:
        raise ArgumentError(
            f"--baseline {path}: this is not the JSON file that hvdlite-run --report writes"
        )
    if version != _VERSION:
        raise ArgumentError(
            f"--baseline {path}: another version of hvdlite wrote this file; make it again"
        )
    try:
        figures = _decode(fields["figures"]) if fields["figures"] is not None else None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ArgumentError(f"--baseline {path}: this file is damaged; make it again") from None
    if figures is None or figures.steps < FEWEST_STEPS or not figures.ranks:
        raise ArgumentError(
            f"--baseline {path}: that job has too few steps to compare with; "
            f"at least {FEWEST_STEPS} are needed"
        )
    return figures


def _decode(fields: dict[str, Any]) -> Figures:
    ranks = tuple(_numbers(RankFigures(**{**rank, "values": {}})) for rank in fields["ranks"])
    stalled = tuple(Stall(**stall) for stall in fields["stalled"])
    events = tuple(Event(**event) for event in fields["events"])
    return _numbers(Figures(**{**fields, "ranks": ranks, "stalled": stalled, "events": events}))


def _numbers(figures: _F) -> _F:
    """Check that what is declared as a number is a finite one."""
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        is_number = type(value) in (int, float) and math.isfinite(value)
        if field.type in ("int", "float") and not is_number:
            raise ValueError(f"{field.name} is not a number")
    return figures
