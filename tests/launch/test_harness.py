"""A world that hangs, fails or leaves something fails its test with the reason."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

import harness
from harness import World, run_world
from patience import HANG

# Ranks are started, or forked from a process that has imported something (see `forkserver`).
STARTED_AND_FORKED = pytest.mark.parametrize("preload", [(), ("wave",)], ids=["started", "forked"])


def hang_on_rank_one() -> None:
    if os.environ["HVDLITE_RANK"] == "1":
        print("hangs", flush=True)
        time.sleep(600)


def fail_on_rank_one() -> str:
    if os.environ["HVDLITE_RANK"] == "1":
        raise ValueError("boom")
    print("said by 0")
    return "fine"


def leave_a_child() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)


@STARTED_AND_FORKED
def test_hung_world_fails_with_the_stacks(preload: tuple[str, ...]) -> None:
    with World(2, hang_on_rank_one, timeout=1.5, preload=preload) as world:
        world.wait_for(1, "hangs", timeout=HANG)
        world.started_at = time.monotonic()  # The deadline does not count the start of Python.
        with pytest.raises(AssertionError, match="in hang_on_rank_one"):
            world.wait()


@STARTED_AND_FORKED
def test_failing_rank_fails_the_test_with_its_output_unless_that_is_expected(
    preload: tuple[str, ...],
) -> None:
    with pytest.raises(AssertionError, match="ValueError: boom"):
        run_world(2, fail_on_rank_one, preload=preload)
    good, bad = run_world(2, fail_on_rank_one, preload=preload, expect_failure=True)
    assert (good.returncode, good.value, good.stdout) == (0, "fine", "said by 0\n")
    assert (bad.returncode, bad.value) == (1, None)


@STARTED_AND_FORKED
def test_process_left_behind_fails_the_test(
    preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_SETTLE", 0.5)
    with pytest.raises(AssertionError, match="left behind: .'process "):
        run_world(1, leave_a_child, preload=preload)
