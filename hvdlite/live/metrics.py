"""The figures of a job for Prometheus, and for everything that reads its text format.

No registry of the process is touched, and there is nothing per tensor, so that the number of series
stays small.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hvdlite.live.run import Figures, Run
from hvdlite.live.totals import Totals

_SPAN = 10.0  # seconds
_KINDS = (
    *("stall", "nonfinite", "error", "process set", "tuned", "epoch", "diverged", "late"),
    "worker",
)  # A counter that is 0 shows its rise, which one that appears later does not.


def exposition(run: Run, now: float, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics of a run and their content type, which scrapers choose by `accept`."""
    # `now` is a monotonic time of this process in seconds.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(run, now))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class RunCollector(Collector):
    """The metrics of a run at a time; its counters never fall within a job."""

    def __init__(self, run: Run, now: float) -> None:
        self._totals = run.totals()
        self._figures = run.figures(_SPAN, now)

    def collect(self) -> Iterator[Metric]:
        """Give all metrics."""
        yield from _of_job(self._totals)
        yield from _by_rank(self._totals)
        yield from _of_now(self._figures)


def _of_job(totals: Totals) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "hvdlite_steps", "Completed training steps.", value=totals.steps.value
    )
    yield SummaryMetricFamily(
        "hvdlite_step_seconds",
        "Time of training steps.",
        count_value=int(totals.steps.value),
        sum_value=totals.seconds.value,
    )
    yield CounterMetricFamily(
        "hvdlite_samples",
        "Samples of all ranks, as given to hvd.observe().",
        value=sum(total.value for total in totals.samples.values()),
    )
    events = CounterMetricFamily("hvdlite_events", "Events by kind.", labels=["kind"])
    for kind in sorted({*_KINDS, *totals.events}):
        events.add_metric([kind], totals.events[kind])
    yield events


def _by_rank(totals: Totals) -> Iterator[Metric]:
    phases = CounterMetricFamily(
        "hvdlite_phase_seconds",
        "Time of a rank in each phase of its steps.",
        labels=["rank", "phase"],
    )
    for (rank, phase), total in sorted(totals.phases.items()):
        phases.add_metric([str(rank), phase], total.value)
    yield phases
    moved = CounterMetricFamily(
        "hvdlite_bytes", "Bytes of tensors that a rank has given to collectives.", labels=["rank"]
    )
    for rank, total in sorted(totals.bytes.items()):
        moved.add_metric([str(rank)], total.value)
    yield moved


def _of_now(figures: Figures | None) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "hvdlite_stalled_tensors",
        "Collectives that wait for ranks, at most 8.",
        value=len(figures.stalled) if figures else 0,
    )
    up = GaugeMetricFamily(
        "hvdlite_rank_up",
        "1 if the rank has said something in the last seconds.",
        labels=["rank", "host"],
    )
    for rank in figures.ranks if figures else ():
        if rank.threads:  # It speaks for itself.
            up.add_metric([str(rank.rank), rank.host], 0 if rank.silent else 1)
    yield up
    yield GaugeMetricFamily(
        "hvdlite_epoch",
        "The epoch of the world, which an elastic job makes anew.",
        value=figures.epoch if figures else 0,
    )
