"""Processes that are stopped, and how long that may last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from hvdlite.launch.process.stopped import StoppedWatch, process_state
from launcher import end_launcher, start_launcher
from patience import HANG, wait_until


def states_of(text: str) -> StoppedWatch:
    """Make a watch with a heartbeat of 4 s, which sees one state after the other."""
    states = iter(text)
    return StoppedWatch(4.0, lambda pid: next(states))


def looks(text: str, seconds: float = 1.0) -> list[bool]:
    watch = states_of(text)
    return [watch.find({7: 1}, 100 + seconds * n) == [7] for n in range(len(text))]


def test_worker_is_found_once_after_the_heartbeat() -> None:
    assert looks("TTTTTTTT") == [False] * 4 + [True] + [False] * 3


def test_worker_that_went_on_meanwhile_starts_anew() -> None:
    assert looks("TTTSTTTTT") == [False] * 8 + [True]


def test_traced_or_busy_worker_is_not_stopped() -> None:
    assert looks("tRSDttttt") == [False] * 9


def test_time_in_which_nobody_looked_does_not_count() -> None:
    assert looks("TTT", seconds=5.0) == [False] * 3


def test_looks_are_a_quarter_of_the_heartbeat_apart() -> None:
    watch = states_of("T")
    assert watch.find({7: 1}, 100.0) == [] and watch.due == 101.0
    assert watch.find({7: 1}, 100.9) == []


def test_state_of_a_process() -> None:
    process = subprocess.Popen(["sleep", "600"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert process_state(process.pid) == "T"
    process.kill()
    process.wait()
    assert process_state(process.pid) == ""


def test_stopped_rank_of_a_job_is_named_until_it_goes_on(tmp_path: Path) -> None:
    stop = "import os; os.environ['HVDLITE_RANK'] == '1' and os.kill(os.getpid(), 19)"  # SIGSTOP
    command = ("--independent", "-np", "2", sys.executable, "-c", stop)
    said = (tmp_path / "errors").read_text  # It has a position of its own in the file.
    with open(tmp_path / "errors", "wb") as errors:
        job = start_launcher(*command, stderr=errors)
    try:
        wait_until(lambda: "lets it go on" in said(), "a word about rank 1")
        found = re.search(r"rank 1 \(pid (\d+)\) is stopped", said())
        assert found is not None, said()
        os.kill(int(found[1]), signal.SIGCONT)
        assert job.wait(timeout=HANG) == 0, said()
    finally:
        end_launcher(job)
    assert said().count("is stopped") == 1
