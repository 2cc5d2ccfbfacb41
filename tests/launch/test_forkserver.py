"""Forked ranks with imported modules behave as others do, also when they fail."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import pytest

import harness
from forkserver import Nursery
from harness import World, base_environment, run_world
from patience import HANG

PRELOAD = ("wave",)


def tell_all() -> tuple[str, bool, bool, float]:
    print("said")
    print("warned", file=sys.stderr)
    # The process that forked this rank has imported the modules of PRELOAD.
    return os.environ["X"], "wave" in sys.modules, os.getsid(0) == os.getpid(), random.random()


def test_ranks_are_their_own() -> None:
    results = run_world(3, tell_all, env=lambda rank: {"X": str(rank)})
    for result in results:
        assert (result.stdout, result.stderr) == ("said\n", "warned\n")
        assert result.value[:3] == (str(result.rank), True, True)
    assert len({result.value[3] for result in results}) == 3


def parent() -> int:
    return os.getppid()


def test_tests_share_a_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = set()
    for test in ("one", "another"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        parents |= {result.value for result in run_world(2, parent)}
    assert len(parents) == 1


def end_in_several_ways() -> None:
    rank = os.environ["HVDLITE_RANK"]
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "1":
        raise ValueError("boom")
    sys.exit(3)


def test_endings_are_told() -> None:
    results = run_world(3, end_in_several_ways, expect_failure=True)
    assert [result.returncode for result in results] == [-signal.SIGKILL, 1, 3]
    assert "ValueError: boom" in results[1].stderr


def hang() -> None:
    print("hangs", flush=True)
    time.sleep(600)


def test_hung_world_fails_with_the_stacks() -> None:
    with World(2, hang, timeout=1.5) as world:
        for rank in (0, 1):
            world.wait_for(rank, "hangs", timeout=HANG)
        world.started_at = time.monotonic()  # The deadline does not count the start of Python.
        with pytest.raises(AssertionError, match="in hang"):
            world.wait()


def leave_a_fork() -> None:
    if os.fork() == 0:
        time.sleep(600)


def test_process_left_behind_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_SETTLE", 0.5)
    with pytest.raises(AssertionError, match="left behind: .'process "):
        run_world(1, leave_a_fork)


def test_worlds_side_by_side() -> None:
    with World(1, hang, env={"A": "1"}) as first, World(1, hang, env={"A": "2"}) as second:
        for number in range(3, 6):  # More than are kept.
            run_world(1, tell_all, env={"A": str(number), "X": ""})
        for world in (first, second):
            world.wait_for(0, "hangs", timeout=HANG)
            world.signal(0, signal.SIGTERM)
            assert world.wait(expect_failure=True)[0].returncode == -signal.SIGTERM


def test_failing_import_is_told() -> None:
    nursery = Nursery(["no_such_module"], base_environment())
    with pytest.raises(AssertionError, match="No module named 'no_such_module'"):
        nursery.ending(1)
    nursery.close()
