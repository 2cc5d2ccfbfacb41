"""The metrics of a job, read by Prometheus's own parsers."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is missing")

from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from hvdlite.live.metrics import exposition
from hvdlite.live.run import Run
from hvdlite.live.sample import Event
from live.made_up_run import BEGAN, MadeUpJob

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(run: Run, now: float = 0.0) -> tuple[Series, set[str]]:
    """Return the value of each series, and which of them are counters."""
    values: Series = {}
    counters = set()
    for family in families(exposition(run, now)[0].decode()):
        assert family.documentation
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            if family.type in ("counter", "summary"):
                counters.add(sample.name)
    return values, counters


def test_the_figures_of_a_job_are_metrics() -> None:
    job = MadeUpJob(2, seconds=20, hosts=("node1", 'no"de\\2\n'))
    job.say((Event(BEGAN, "stall", 1, "x", "x waits"), Event(BEGAN, "stall", 1, "y", "y waits")))
    values, _ = read(job.run, job._begin + job.second)
    steps = job.run.latest()[0].steps
    assert steps is not None
    assert values["hvdlite_steps_total", ()] == steps.count
    assert values["hvdlite_step_seconds_count", ()] == steps.count
    assert values["hvdlite_step_seconds_sum", ()] == pytest.approx(steps.seconds)
    for rank, row in enumerate(steps.ranks):
        for phase in ("backward", "waiting", "communicating", "between"):
            series = ("hvdlite_phase_seconds_total", (("phase", phase), ("rank", str(rank))))
            assert values[series] == pytest.approx(getattr(row, phase))
        assert values["hvdlite_bytes_total", (("rank", str(rank)),)] == 1e8 * steps.count
    assert values["hvdlite_samples_total", ()] == sum(job._samples.values())
    assert values["hvdlite_stalled_tensors", ()] == 0
    assert values["hvdlite_epoch", ()] == 0
    assert values["hvdlite_rank_up", (("host", "node1"), ("rank", "0"))] == 1
    assert values["hvdlite_rank_up", (("host", 'no"de\\2\n'), ("rank", "1"))] == 1
    assert values["hvdlite_events_total", (("kind", "stall"),)] == 2
    assert values["hvdlite_events_total", (("kind", "error"),)] == 0


def test_a_silent_rank_is_down() -> None:
    job = MadeUpJob(1, seconds=5)
    values, _ = read(job.run, job._begin + job.second + 10)
    assert values["hvdlite_rank_up", (("host", "node1"), ("rank", "0"))] == 0


def test_a_run_without_lines_has_metrics() -> None:
    values, _ = read(Run())
    assert values["hvdlite_steps_total", ()] == 0
    assert not [name for name, labels in values if ("rank", "0") in labels]


def test_the_newer_format_is_given_to_those_who_ask() -> None:
    job = MadeUpJob(2, seconds=5)
    asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    content, kind = exposition(job.run, 0.0, asked)
    assert kind.startswith("application/openmetrics-text")
    assert content.endswith(b"# EOF\n")
    assert {"hvdlite_steps", "hvdlite_rank_up"} <= {
        family.name for family in open_families(content.decode())
    }


def test_counters_never_fall_when_the_ranks_of_an_elastic_job_change() -> None:
    job = MadeUpJob(3, seconds=10)
    before, counters = read(job.run)
    for ranks in (2, 4, 1):
        job.next_epoch(ranks)
        for _ in range(3):
            job.say((Event(BEGAN, "epoch", -1, "", "the world begins anew"),))
            now, _ = read(job.run)
            for series in before:
                if series[0] in counters:
                    assert now[series] >= before[series], series
            assert now["hvdlite_steps_total", ()] > before["hvdlite_steps_total", ()]
            before = now
    assert before["hvdlite_epoch", ()] == 3
    assert before["hvdlite_events_total", (("kind", "epoch"),)] == 9
    # Processes that live on count their samples on, which are not to be counted twice.
    assert before["hvdlite_samples_total", ()] == sum(job._samples.values())


def test_counters_go_on_after_a_shutdown_and_another_init() -> None:
    job = MadeUpJob(1, seconds=10)
    steps = round(job._steps)
    job._steps = 0.0
    job._sums = [[0.0] * 7]
    job.say()
    values, _ = read(job.run)
    assert values["hvdlite_steps_total", ()] == steps + round(job._steps)
