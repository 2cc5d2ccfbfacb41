"""The rows of the screen fit the terminal, and nothing that a rank says can steer it."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace

import pytest

from hvdlite.launch.console import styled
from hvdlite.live.run import About, Run
from hvdlite.live.sample import Event, Sample, Stall
from hvdlite.live.screen import draw, headline
from live.made_up_run import make_run

ABOUT = About(("python", "/home/me/train.py", "--lr", "1"), 2, ("node0",), time.time())
NOTE = "straggler: 20 ms late in data or forward, 100 % of steps"
ESCAPES = re.compile(rb"\x1b\[[\d;]*m")


def rows(run: Run, width: int, height: int = 40, now: float = 80.0) -> list[str]:
    about = replace(ABOUT, began=time.time() - 62.5)
    drawn = draw(run, about, width, height, now)
    assert len(drawn) <= max(1, height // 2)
    return [styled("", text, width - 1).decode().rstrip() for _, text in drawn]


def test_wide_screen_is_a_table_with_notes() -> None:
    assert rows(make_run(), 120) == [
        "train.py  step 300  10 step/s  640 samples/s  40.0 MB/s  np 2  0:01:02",
        "rank host  backward waiting   comm. between    cpu      rss",
        "0    node0    40 ms   20 ms   10 ms   30 ms   90 %   1.1 GB",
        "1    node1    40 ms    0 µs   10 ms   50 ms   90 %   1.1 GB  " + NOTE,
    ]


def test_middle_screen_has_notes_below() -> None:
    shown = rows(make_run(), 80)
    assert len(shown) == 5
    assert shown[-1] == f"rank 1: {NOTE}"
    assert shown[3].startswith("1 ")


def test_narrow_or_low_screen_has_the_headline_alone() -> None:
    for shown in (rows(make_run(), 50), rows(make_run(), 120, height=6), rows(make_run(), 7)):
        assert len(shown) == 1
        assert "train.py  step 300"[: len(shown[0])] == shown[0][:18]


def test_of_many_ranks_the_slowest_are_shown() -> None:
    shown = rows(make_run(size=64, straggler=37), 120, height=24)
    assert len(shown) <= 12
    assert any(row.startswith("37 ") and "straggler" in row for row in shown)
    assert shown[-1] == f"and {64 - (len(shown) - 3)} more ranks, which are less late"


def test_silent_and_preempted_ranks_are_noted() -> None:
    shown = rows(make_run(straggler=-1), 120, now=88.4)
    assert shown[2].endswith("silent for 8 s")
    run = Run()
    for second in range(1, 9):
        sample = Sample(0, 1, 0, "h", 1, float(second), 0.0, {}, switches=210 * second, threads=4)
        run.add(replace(sample, cores=2, core_wait=float(second)), float(second))
    assert rows(run, 120, now=8.0)[2].endswith("preempted 210/s: gets 0 % of a core")


def test_events_and_stalls_stand_below() -> None:
    events = (
        Event(112.0, "tuned", 0, "", "an old event"),
        Event(127.0, "worker", -1, "", "epoch 2"),
    )
    stalls = (Stall("grad.0", 11.4, (0,), (1,)),)
    run = make_run(more={"stalled": stalls})
    for event in events:
        run.note(event)
    shown = rows(run, 120)
    assert shown[-3:] == [
        "rank 0 is in 'grad.0'; rank 1 has not called it for 11 s",
        "18 s ago: an old event",
        "3 s ago: epoch 2",
    ]


def test_what_ranks_say_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;title\x07\r\n\u202e[red]x"
    stalls = (Stall(evil, 11.4, (0,), (1,)),)
    events = (Event(130.0, "stall", 0, evil, evil),)
    run = make_run(more={"stalled": stalls, "host": evil, "events": events})
    for width in (50, 80, 120, 300):
        for style, text in draw(run, ABOUT, width, 40, 80.0):
            row = ESCAPES.sub(b"", styled(style, text, width - 1)).decode()
            assert row.isprintable() and len(row) < width


def test_before_the_first_sample_the_screen_says_so() -> None:
    assert rows(Run(), 80) == ["train.py  waiting for the first samples"]


def test_job_without_steps_has_no_phases() -> None:
    run = make_run(more={"steps": None})
    shown = rows(run, 120)
    assert "step" not in shown[0]
    assert shown[2].split()[2:6] == ["-"] * 4


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e300])
def test_any_number_can_be_shown(value: float) -> None:
    figures = make_run().figures(10.0, 80.0)
    assert figures is not None
    odd = replace(figures, samples=value, bytes_per_step=value, step=value)
    assert headline(odd, ABOUT, time.time()).startswith("train.py")
