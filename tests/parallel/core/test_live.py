"""`Engine.live()` has the events of each rank once, and what stalls on rank 0."""

from __future__ import annotations

from typing import Any

from faults.arrays import ones, reduce_array, submit
from harness import run_world
from hvdlite import basics
from patience import wait_until

PRELOAD = ("numpy",)


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
        assert not any(told["events"] for told in others)
        assert first["counters"].keys() == others[-1]["counters"].keys()
    stalled = results[0].value[-2]["stalled"]
    slow = next(row for row in stalled if row[0] == "slow")
    assert slow[1] >= 1
    assert slow[2:] == [[0], [1]]
