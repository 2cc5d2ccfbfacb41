"""If a rank does not submit a tensor, or raises an exception, the other ranks are told its name."""

from __future__ import annotations

import time
from typing import Any

from faults.arrays import (
    describe,
    note_time,
    ones,
    reduce_array,
    reduce_until_error,
    total_of_ones,
    works,
)
from harness import run_world
from hvdlite import _core, basics
from hvdlite.errors import HvdliteError

TENSOR = "encoder.weight"


def come_late(seconds: float) -> bool:
    basics.init()
    assert works("before")
    if basics.rank() == 2:
        time.sleep(seconds)
    return bool((reduce_array(ones(), TENSOR) == total_of_ones()).all())


def test_missing_rank_is_named_in_a_warning_and_its_late_coming_is_no_error() -> None:
    results = run_world(3, come_late, args=(2.5,), env={"HVDLITE_STALL_WARNING": "1"})
    assert all(result.value for result in results)
    warnings = [
        line
        for result in results
        for line in result.stderr.splitlines()
        if TENSOR in line and "rank 2" in line
    ]
    assert warnings, "no rank warned: " + "".join(result.stderr for result in results)
    assert len(warnings) <= 3


def test_the_warning_comes_after_ten_seconds_unless_set_otherwise() -> None:
    row = next(knob for knob in _core.knobs() if knob["name"] == "stall_warning")
    assert float(row["default"]) == 10.0


def never_come(seconds: float) -> dict[str, Any]:
    basics.init()
    assert works("before")
    begun = time.monotonic()
    if basics.rank() == 2:
        time.sleep(seconds)
    try:
        reduce_array(ones(), TENSOR)
    except HvdliteError as error:
        return {**describe(error), "begun": begun}
    raise AssertionError("the stalled tensor was reduced")


def test_missing_rank_fails_the_job_after_the_stall_shutdown_time() -> None:
    limit = 1.5
    results = run_world(3, never_come, args=(limit + 1.5,), env={"HVDLITE_STALL_SHUTDOWN": "1.5"})
    for result in results:
        assert result.value["kind"] == "StalledError"
        assert TENSOR in result.value["message"]
        assert "rank 2" in result.value["message"]
    for result in results[:2]:
        assert limit <= result.value["seen"] - result.value["begun"] <= limit + 1


def raise_in_rank_one(noted: str) -> dict[str, Any]:
    basics.init()
    reduce_array(ones(), TENSOR)
    if basics.rank() == 1:
        note_time(noted)
        raise ValueError("the learning rate is a banana")
    return reduce_until_error(TENSOR)


def test_exception_of_one_rank_is_what_the_others_show(tmp_path: Any) -> None:
    noted = tmp_path / "raised"
    results = run_world(3, raise_in_rank_one, args=(str(noted),), expect_failure=True)
    assert results[1].returncode != 0
    for result in (results[0], results[2]):
        error = result.value
        assert error["kind"] == "RankFailedError"
        assert error["rank"] == 1
        assert "rank 1" in error["message"]
        assert TENSOR in error["message"]
        assert "ValueError" in error["message"]
        assert "the learning rate is a banana" in error["message"]
        assert error["seen"] - float(noted.read_text()) <= 1.0
