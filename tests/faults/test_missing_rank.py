"""If a rank does not submit a tensor, or raises an exception, the other ranks are told its name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import (
    describe,
    note_time,
    noted_time,
    ones,
    reduce_array,
    reduce_until_error,
    seconds_between,
    total_of_ones,
    works,
)
from harness import World, run_world
from hvdlite import _core, basics
from hvdlite.errors import HvdliteError
from patience import Stopwatch, wait_until

PRELOAD = ("numpy",)

TENSOR = "encoder.weight"


def come_late(go: str) -> bool:
    basics.init()
    assert works("before")
    if basics.rank() == 2:
        wait_until(Path(go).exists, "a warning about this rank")
    return bool((reduce_array(ones(), TENSOR) == total_of_ones()).all())


def warnings_in(text: str) -> int:
    """Count the lines that say that the tensor waits for rank 2."""
    return sum(TENSOR in line and "rank 2" in line for line in text.splitlines())


def test_missing_rank_is_named_in_a_warning_and_its_late_coming_is_no_error(tmp_path: Path) -> None:
    go, env = tmp_path / "go", {"HVDLITE_STALL_WARNING": "1"}
    with World(3, come_late, str(go), env=env) as world:
        wait_until(lambda: any(warnings_in(world.stderr(rank)) for rank in range(3)), "a warning")
        go.touch()
        results = world.wait()
    assert all(result.value for result in results)
    assert sum(warnings_in(result.stderr) for result in results) <= 3


def test_the_warning_comes_after_ten_seconds_unless_set_otherwise() -> None:
    row = next(knob for knob in _core.knobs() if knob["name"] == "stall_warning")
    assert float(row["default"]) == 10.0


def never_come(folder: str) -> dict[str, Any]:
    basics.init()
    assert works("before")
    failed = [Path(folder) / str(rank) for rank in range(2)]
    if basics.rank() == 2:
        wait_until(lambda: all(path.exists() for path in failed), "the other ranks give up")
    begun, watch = time.monotonic(), Stopwatch()
    try:
        reduce_array(ones(), TENSOR)
    except HvdliteError as error:
        told = {**describe(error), "waited": time.monotonic() - begun, "seconds": watch.seconds()}
        (Path(folder) / str(basics.rank())).touch()
        return told
    raise AssertionError("the stalled tensor was reduced")


@pytest.mark.parametrize("knob", ["HVDLITE_STALL_SHUTDOWN", "HVDLITE_COLLECTIVE_TIMEOUT"])
def test_missing_rank_fails_the_job_after_the_time_that_is_set(knob: str, tmp_path: Path) -> None:
    limit = 1.5
    env = {knob: str(limit)}
    results = run_world(3, never_come, args=(str(tmp_path),), env=env)
    for result in results:
        assert result.value["kind"] == "StalledError"
        assert TENSOR in result.value["message"]
        assert "rank 2" in result.value["message"]
    # The time runs from the first submission; the other rank may have come later.
    assert max(result.value["waited"] for result in results[:2]) >= limit
    assert all(result.value["seconds"] <= limit + 1 for result in results[:2])


def leave_early() -> dict[str, Any]:
    basics.init()
    reduce_array(ones(), TENSOR)
    if basics.rank() == 2:
        basics.shutdown()
        return {}
    return reduce_until_error(TENSOR)


def test_rank_that_leaves_early_is_named_as_one_that_left() -> None:
    for result in run_world(3, leave_early)[:2]:
        error = result.value
        assert (error["kind"], error["rank"]) == ("RankFailedError", 2)
        assert "rank 2 left after 1 collectives, but " in error["message"]
        assert TENSOR in error["message"]


def raise_in_rank_one(noted: str) -> dict[str, Any]:
    basics.init()
    reduce_array(ones(), TENSOR)
    if basics.rank() == 1:
        note_time(noted)
        raise ValueError("the learning rate is a banana")
    return reduce_until_error(TENSOR)


def test_exception_of_one_rank_is_what_the_others_show(tmp_path: Path) -> None:
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
        assert seconds_between(noted_time(noted), error["seen"]) <= 1.0


def raise_in_a_thread_of_rank_one() -> dict[str, Any] | None:
    """Call the training function as Ray does: in a thread, which tells the peers of its end."""
    basics.init()
    found: list[dict[str, Any] | None] = [None]

    def train() -> None:
        reduce_array(ones(), "warm.up")
        if basics.rank() == 1:
            raise ValueError("no such file")
        found[0] = reduce_until_error("layer.weight")

    def call() -> None:
        try:
            train()
        except ValueError as error:
            basics.tell_peers(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def test_exception_in_another_thread_is_told_to_all_peers() -> None:
    results = run_world(3, raise_in_a_thread_of_rank_one)
    assert results[1].value is None
    for result in (results[0], results[2]):
        assert result.value["rank"] == 1
        assert "rank 1 raised ValueError: no such file at " in result.value["message"]
