"""What is known of a job from the samples of its ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvdlite.live.sample import Event, Sample, Stall
from live.made_up_run import make_run, make_sample


def test_a_sample_keeps_all_it_says() -> None:
    sample = make_sample(0, 12.5, 4)
    events, stalls = (Event(12.0, "stall", 1, "x", "x waits"),), (Stall("x", 11.0, (0,), (1,)),)
    told = replace(sample, events=events, stalled=stalls)
    for one in (sample, told, make_sample(1, 12.5)):
        assert Sample.parse(one.line()) == one
        assert one.line().count(b"\n") == 1


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"7", b'{"rank":1}', b'{"steps":[1,2]}', b'{"events":[[1]]}', b"\xff"],
)
def test_what_is_not_a_sample_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        Sample.parse(line)


@pytest.mark.parametrize("seconds", [5.0, 60.0, math.inf])
def test_figures_are_means_of_the_steps(seconds: float) -> None:
    figures = make_run(30, late=0.01, in_backward=0.01).figures(seconds, 80.0)
    assert figures is not None
    assert figures.step == pytest.approx(0.1)
    assert figures.rate == pytest.approx(10)
    assert figures.steps == 10 * min(seconds, 30)
    assert figures.total_steps == 300
    assert figures.bytes_per_step == 4_000_000
    assert figures.bytes == pytest.approx(40_000_000)
    assert figures.samples == pytest.approx(2 * 320)
    first, second = figures.ranks
    assert (first.backward, first.waiting) == pytest.approx((0.04, 0.01))
    assert (first.communicating, first.between, first.last) == pytest.approx((0.01, 0.04, 0))
    assert (second.backward, second.waiting, second.last) == pytest.approx((0.05, 0, 1))
    assert (second.late_between, second.late_backward) == pytest.approx((0, 0.01))
    for rank in figures.ranks:
        assert rank.cpu == pytest.approx(0.9)
        assert rank.switches == pytest.approx(7, abs=0.3)
        assert rank.silent == 0


def test_a_rank_that_has_left_is_not_silent() -> None:
    run = make_run(30)
    run.add(replace(make_sample(1, 31.0), ended=True), 81.0)
    for second in range(31, 60):
        run.add(make_sample(0, second), 50.0 + second)
    figures = run.figures(10.0, 110.0)
    assert figures is not None
    assert [rank.silent for rank in figures.ranks] == [0.0, 0.0]


def test_a_rank_without_lines_is_silent() -> None:
    run = make_run(10)
    run.add(make_sample(0, 15.0), 65.0)
    figures = run.figures(5, 66.0)
    assert figures is not None
    assert [rank.silent for rank in figures.ranks] == [0.0, 6.0]


def test_a_new_epoch_begins_anew_and_keeps_the_count_of_steps() -> None:
    run = make_run(10)
    run.add(make_sample(0, 11.0, 4, epoch=1), 61.0)
    run.add(make_sample(1, 11.5), 61.5)  # It comes late.
    figures = run.figures(5, 62.0)
    assert figures is not None
    assert (figures.epoch, figures.steps, figures.total_steps) == (1, 4, 104)
    assert [rank.rank for rank in figures.ranks] == [0]


def test_a_long_run_keeps_some_hundred_points_of_all_of_it() -> None:
    run = make_run(5000)
    for points in run.history().values():
        assert 200 < len(points) <= 600
        assert points[0].time == 101.0
        assert points[-1].time > 5000
    figures = run.figures(1000, 5050.0)
    assert figures is not None
    assert figures.steps == pytest.approx(10_000, rel=0.02)
    assert figures.step == pytest.approx(0.1)
