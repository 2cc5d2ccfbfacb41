"""The harness: a world that hangs, fails or leaves something fails its test with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import harness
from harness import World, base_environment, run_world
from patience import HANG, Stopwatch, wait_until

ROOT = Path(__file__).resolve().parents[2]
TESTS = str(ROOT / "tests")


def who(factor: int) -> tuple[int, str | None]:
    return int(os.environ["HVDLITE_RANK"]) * factor, os.environ.get("HVDLITE_HOST_ID")


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


def wait_for_signal() -> None:
    print("waiting", flush=True)
    time.sleep(600)


def test_values_come_back_by_rank() -> None:
    assert [result.value for result in run_world(3, who, 7)] == [(0, None), (7, None), (14, None)]


def test_hosts_and_environment_by_rank() -> None:
    results = run_world(3, who, 1, hosts=[0, 0, 1], env=lambda rank: {"X": str(rank)})
    assert [result.value[1] for result in results] == ["host0", "host0", "host1"]


def test_source_instead_of_a_function() -> None:
    results = run_world(2, "import os; print(os.environ['HVDLITE_SIZE'])")
    assert [result.stdout for result in results] == ["2\n", "2\n"]


def test_hung_world_fails_with_the_stacks() -> None:
    with World(2, hang_on_rank_one, timeout=1.5) as world:
        world.wait_for(1, "hangs", timeout=HANG)
        world.started_at = time.monotonic()  # The deadline does not count the start of Python.
        watch = Stopwatch()
        with pytest.raises(AssertionError, match="in hang_on_rank_one"):
            world.wait()
        assert watch.seconds() <= 4.0


def test_failing_rank_fails_the_test_with_its_output() -> None:
    with pytest.raises(AssertionError, match="ValueError: boom"):
        run_world(2, fail_on_rank_one)


def test_expected_failure_is_returned() -> None:
    good, bad = run_world(2, fail_on_rank_one, expect_failure=True)
    assert (good.returncode, good.value, good.stdout) == (0, "fine", "said by 0\n")
    assert bad.returncode == 1
    assert "ValueError: boom" in bad.stderr
    assert bad.value is None


def test_process_left_behind_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_SETTLE", 0.5)
    with pytest.raises(AssertionError, match="left behind: .'process "):
        run_world(1, leave_a_child)


def test_world_can_be_acted_on_from_outside() -> None:
    with World(2, wait_for_signal) as world:
        for rank in (0, 1):
            world.wait_for(rank, "waiting", timeout=HANG)
            world.signal(rank, 9)
        assert [result.returncode for result in world.wait(expect_failure=True)] == [-9, -9]


def test_world_dies_with_the_test_process(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom harness import World\n"
        "world = World(2, 'import time; time.sleep(600)')\n"
        "print(*world.pids, flush=True)\ntime.sleep(600)"
    )
    env = base_environment()
    env["PYTHONPATH"] = os.pathsep.join([TESTS, *env.get("PYTHONPATH", "").split(os.pathsep)])
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, cwd=tmp_path, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the ranks")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# The time limit is over when both ranks sleep, however long their start takes.
LIMITED = """
import signal
import time
import pytest
from harness import World

def sleep_long():
    print("sleeps", flush=True)
    time.sleep(600)

@pytest.mark.timeout(200)
def test_that_hangs():
    with World(2, sleep_long) as world:
        for rank in (0, 1):
            world.wait_for(rank, "sleeps")
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        world.wait()

def test_that_follows():
    pass
"""


def test_time_limit_ends_one_test_and_shows_the_stacks_of_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "test_limited.py"
    file.write_text(LIMITED)
    settings = [f"--rootdir={tmp_path}", "--import-mode=importlib", "-c", ROOT / "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *settings, file]
    env = {**base_environment(), "PYTHONPATH": TESTS}
    result = subprocess.run(
        command, env=env, cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    for rank in (0, 1):
        assert f"--- rank {rank} (running) stderr:" in result.stdout
    assert result.stdout.count("in sleep_long") >= 2
