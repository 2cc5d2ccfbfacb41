"""`Engine.live()`: where the time of steps goes, and who is late, in which phase."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from faults.arrays import Array, ones, reduce_array, submit
from harness import run_world
from hvdlite import basics
from hvdlite.live.sample import RankSteps
from patience import wait_until

PRELOAD = ("numpy",)

_GRADIENTS = 6
_SHORTEST_DELAY = 0.03
_TRIES = 4


def _train(late: int, phase: str, steps: int, loss: bool = False) -> dict[str, Any]:
    """Make steps in which one rank sleeps; return what rank 0's engine says of them."""
    # On a crowded machine all ranks are late now and then; the delay has to be longer than that,
    # also if the machine becomes more crowded meanwhile.
    basics.init()
    longest = _longest_step(20, -1, phase, 0.0, loss)
    reduce_array(longest, "longest", "max")
    for _ in range(_TRIES):
        basics.shutdown()
        delay = max(_SHORTEST_DELAY, 2 * float(longest[0]))
        basics.init()
        longest = _longest_step(steps, late, phase, delay, loss)
        told = basics.engine().live()
        told["delay"] = delay
        reduce_array(longest, "longest", "max")
        if 2 * longest[0] <= delay:
            break
    return told


def _longest_step(steps: int, late: int, phase: str, delay: float, loss: bool) -> Array:
    """Make steps; return the time of the longest one on this rank, beyond the delay."""
    longest = np.zeros(1)
    for _ in range(steps):
        begun = time.monotonic()
        _step(late, phase, delay, loss)
        longest[0] = max(longest[0], time.monotonic() - begun - delay)
    return longest


def _step(late: int, phase: str, delay: float, loss: bool) -> None:
    gradients = [ones(2000) for _ in range(_GRADIENTS)]
    if phase == "between" and basics.rank() == late:
        time.sleep(delay)
    handles = []
    for number, gradient in enumerate(gradients):
        if phase == "backward" and number == 3 and basics.rank() == late:
            time.sleep(delay)
        time.sleep(0.0005)
        handles.append(submit(gradient, f"gradient{number}"))
    for handle in handles:
        handle.wait()
    if loss:
        array = ones(1)
        reduce_array(array, "loss")


def _rows(told: dict[str, Any]) -> list[RankSteps]:
    return [RankSteps(*row) for row in told["steps"]["ranks"]]


@pytest.mark.parametrize("loss", [False, True], ids=["gradients", "and a loss"])
@pytest.mark.parametrize("phase", ["between", "backward"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_planted_delay_is_that_of_the_right_rank_and_phase(
    size: int, phase: str, loss: bool
) -> None:
    results = run_world(size, _train, size - 1, phase, 27, loss)
    told = results[0].value
    steps, delay_each = told["steps"], told["delay"]
    assert 25 <= steps["count"] <= 26
    rows = _rows(told)
    late = rows[-1]
    assert late.last >= 0.6 * steps["count"], rows
    delay = {"between": late.late_between, "backward": late.late_backward}
    blamed = delay.pop(phase)
    assert blamed >= 0.5 * late.last * delay_each, rows
    assert blamed > sum(delay.values()), rows
    for row in rows[:-1]:
        assert row.waiting > 0.3 * steps["count"] * delay_each, rows
    for row in rows:
        phases = row.backward + row.waiting + row.communicating + row.between
        # A rank that is late is so from the first step on: its time begins later than the mean's.
        assert phases == pytest.approx(steps["seconds"], rel=0.05, abs=7 * delay_each), rows
    assert all(result.value["steps"] is None for result in results[1:])


def test_a_rank_alone_has_steps_too() -> None:
    told = run_world(1, _train, 0, "between", 12)[0].value
    (row,) = _rows(told)
    assert told["steps"]["count"] == 10
    assert row.between > 10 * told["delay"]
    assert (row.waiting, row.last) == (0, 0)


def _note_and_stall() -> list[dict[str, Any]]:
    basics.init()
    engine = basics.engine()
    engine.note("diverged", "layer.weight", "a \N{SNOWMAN} note")
    said = [engine.live()]
    handle = None
    if basics.rank() == 0:
        handle = submit(ones(), "slow")

        def stalled() -> bool:
            said.append(engine.live())
            # What rank 1 waits for stalls, too, and may have done so a little earlier.
            return "slow" in [row[0] for row in said[-1]["stalled"]]

        wait_until(stalled, "a stall")
    reduce_array(ones(), "together")
    (handle or submit(ones(), "slow")).wait()
    said.append(engine.live())
    return said


def test_live_has_events_once_and_what_stalls() -> None:
    results = run_world(2, _note_and_stall)
    for rank, result in enumerate(results):
        first, *others = result.value
        times = [told["time"] for told in result.value]
        assert times == sorted(times)
        assert first["began"] < times[0]
        assert [event[1:] for event in first["events"]] == [
            ["diverged", rank, "layer.weight", "a \N{SNOWMAN} note"]
        ]
        assert first["began"] < first["events"][0][0] <= first["time"]
        assert first["dropped_events"] == 0
        assert not any(told["events"] for told in others)
        assert first["counters"].keys() == others[-1]["counters"].keys()
    stalled = results[0].value[-2]["stalled"]
    slow = next(row for row in stalled if row[0] == "slow")
    assert slow[1] >= 1
    assert slow[2:] == [[0], [1]]
