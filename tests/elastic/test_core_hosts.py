"""Hosts of an elastic job are lost, silent or taken away; the oracle replays the job."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from elastic.journals import check_core_job, read_journals
from elastic.plans import Plan
from fakes.ssh import agent_of, fake_ssh
from launcher import end_launcher, start_launcher
from patience import HANG

STEPS = 400


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_host_of_two_workers_goes(number: signal.Signals, tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    journals.mkdir()
    plan = Plan(str(journals), STEPS, pause=0.01)
    worker = (sys.executable, str(Path(__file__).with_name("core_worker.py")), plan.as_json())
    launcher = start_launcher(
        *("-np", "3", "--min-np", "1", "-H", "far1:1,far2:2", "--elastic-heartbeat", "1"),
        *worker,
        env={"OMP_NUM_THREADS": "1", "PATH": fake_ssh(tmp_path)},
    )
    try:
        assert launcher.stderr is not None
        assert any(b"world 0: 3 ranks" in line for line in launcher.stderr)
        time.sleep(0.3)
        os.kill(agent_of(tmp_path, "far2"), number)
        _, stderr = launcher.communicate(timeout=2 * HANG)
    finally:
        end_launcher(launcher)
    assert launcher.returncode == 0, stderr
    journeys = read_journals(journals)
    check_core_job(journeys, STEPS)
    for worker in (1, 2):
        assert journeys[worker].end is None
        assert f"worker {worker} (host far2)".encode() in stderr
