"""A worker that holds Python's lock, and an hvdlite-run that is stopped, are late and not dead."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from launcher import end_launcher, start_launcher
from patience import HANG, wait_until

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
from hvdlite import basics
from hvdlite.elastic import ObjectState, epochs, run
from hvdlite.objects import broadcast_object

held, went_on = Path(sys.argv[1], "held"), Path(sys.argv[1], "went on")

@run
def train(state):
    worker, ended = epochs.current().worker, False
    while not ended:  # rank 0 decides for both
        if worker == 1 and not held.exists():
            ctypes.PyDLL(None).usleep(2_500_000)  # a call that keeps Python's lock
            held.touch()
        state.step, ended = broadcast_object((state.step + 1, went_on.exists()), 0)
        state.commit()
        time.sleep(0.01)
    print("history", len(epochs.history()), flush=True)

basics.init()
train(ObjectState(broadcast_object, basics.rank, step=0))
"""
SECONDS = 2.5  # of silence, more than six heartbeats


@pytest.mark.long
def test_nobody_is_evicted(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--elastic-heartbeat", "0.4")
    job = start_launcher(*flags, sys.executable, "-c", SCRIPT, str(tmp_path))
    try:
        wait_until((tmp_path / "held").exists, "the worker with the lock goes on", 2 * HANG)
        job.send_signal(signal.SIGSTOP)
        time.sleep(SECONDS)
        job.send_signal(signal.SIGCONT)
        (tmp_path / "went on").touch()
        stdout, stderr = (text.decode() for text in job.communicate(timeout=2 * HANG))
    finally:
        end_launcher(job)
    assert job.returncode == 0, stderr
    assert stdout.count("history 1\n") == 2, stdout
    assert "world 1" not in stderr, stderr
