"""The batch script of `hvdlite-run --emit slurm`, on a real Slurm of two nodes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusters.slurm import Slurm
from harness import base_environment
from hvdlite.launch.process import processes_with
from launcher import run_launcher
from patience import HANG, wait_until

pytestmark = pytest.mark.slurm

STEPPER = str(Path(__file__).with_name("stepper.py"))


def emit(*arguments: str) -> str:
    done = run_launcher("--emit", "slurm", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Batch:
    """A submitted script that runs the stepper on all four processors."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str) -> None:
        self.slurm = slurm
        self.folder = folder
        self.mark = f"TEST_MARK={folder}"
        script = folder / "train.sh"
        script.write_text(emit("-np", "4", "--ntasks-per-node", "2", "--", sys.executable, STEPPER))
        self.job = slurm.submit(script, *options, env=environment(TEST_MARK=str(folder)))

    def wait_for(self, pattern: str, count: int, most: float = 2 * HANG) -> list[str]:
        """Wait until the output matches so often; return what the pattern found."""
        deadline = time.monotonic() + most
        while len(found := re.findall(pattern, self.output())) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{pattern}: {self.output()}\n{self.slurm.state(self.job)}")
            time.sleep(0.1)
        return found

    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("slurm-*.out"))

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not processes_with(self.mark), "the end of all processes of the job")


def environment(**more: str) -> Mapping[str, str]:
    return {**base_environment(), "OMP_NUM_THREADS": "1", **more}


def test_signal_saves_one_step_and_the_job_comes_back_and_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    batch = Batch(slurm, tmp_path)
    batch.wait_for("epoch 0 rank . of 4 on node. begins at 0", 4)
    slurm.run("scancel", "--signal=USR1", batch.job)
    saved = batch.wait_for(r"rank . saved (\d+) by rank .: SIGUSR1", 4)
    assert len(set(saved)) == 1, batch.output()
    (tmp_path / "enough").touch()
    begun = batch.wait_for(r"epoch 1 rank . of 4 on node. begins at (\d+)\n", 4)
    assert begun == saved
    slurm.wait_for_state(batch.job, "COMPLETED", restarts=1)
    assert batch.output().count("has done enough") == 4
    batch.assert_nothing_is_left()


def test_time_limit_sends_the_signal(slurm: Slurm, tmp_path: Path) -> None:
    batch = Batch(slurm, tmp_path, "--time=2")  # The signal is sent two minutes before its end.
    saved = batch.wait_for(r"rank . saved (\d+) by rank .: SIGUSR1", 4)
    assert len(set(saved)) == 1, batch.output()
    slurm.run("scancel", batch.job)
    slurm.wait_for_state(batch.job, "CANCELLED")
    batch.assert_nothing_is_left()


def test_job_that_is_cancelled_saves_and_does_not_come_back(slurm: Slurm, tmp_path: Path) -> None:
    batch = Batch(slurm, tmp_path)
    batch.wait_for("epoch 0 rank . of 4 on node. begins at 0", 4)
    slurm.run("scancel", batch.job)
    saved = batch.wait_for(r"rank . saved (\d+) by rank .: SIGTERM", 4)
    assert len(set(saved)) == 1, batch.output()
    slurm.wait_for_state(batch.job, "CANCELLED")
    batch.assert_nothing_is_left()
    assert slurm.state(batch.job)["JobState"] == "CANCELLED"  # PENDING if it was queued again


def test_rank_that_is_killed_ends_the_job_for_good(slurm: Slurm, tmp_path: Path) -> None:
    batch = Batch(slurm, tmp_path)
    batch.wait_for("epoch 0 rank . of 4 on node. begins at 0", 4)
    (victim,) = processes_with(batch.mark, "SLURM_PROCID=3")
    os.kill(victim, signal.SIGKILL)
    slurm.wait_for_state(batch.job, "FAILED")
    state = slurm.state(batch.job)
    assert (state["ExitCode"], state["Restarts"]) == ("137:0", "0")
    assert batch.output().count("RankFailedError: rank 3 died") == 3
    batch.assert_nothing_is_left()
