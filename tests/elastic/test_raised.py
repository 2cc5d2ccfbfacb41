"""A worker whose script has raised, and whose process takes longer than the heartbeat to end."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from launcher import LauncherResult, run_launcher
from patience import HANG

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
from hvdlite import basics
from hvdlite.elastic import ObjectState, epochs, run
from hvdlite.objects import broadcast_object

def end_late(seconds):  # Python waits for this thread, before it calls what atexit has.
    threading.Thread(target=time.sleep, args=(seconds,)).start()

@run
def train(state):
    worker = epochs.current().worker
    while len(epochs.history()) < 2:
        state.step += 1
        state.check_host_updates()
        if worker == 1 and state.step == 5:
            Path(sys.argv[2]).write_text(str(os.getpid()))
            end_late(4.0)  # much longer than the heartbeat
            raise ValueError("a bug")
    if sys.argv[1] == "all":
        raise ValueError("another bug")
    raised = Path("/proc", Path(sys.argv[2]).read_text())
    while raised.exists():
        time.sleep(0.01)

basics.init()
train(ObjectState(broadcast_object, basics.rank, step=0))
"""
FLAGS = ("-np", "2", "--min-np", "1", "--max-np", "2", "--elastic-heartbeat", "2")


def run_script(which: str, folder: Path) -> LauncherResult:
    """Run two workers of which "one" or "all" raise."""
    command = (sys.executable, "-c", SCRIPT, which, str(folder / "pid"))
    return run_launcher(*FLAGS, *command, timeout=2 * HANG)


def test_process_that_ends_late_is_not_killed_and_does_not_hold_up_the_others(
    tmp_path: Path,
) -> None:
    result = run_script("one", tmp_path)
    assert result.returncode == 0, result.stderr
    host = re.escape(socket.gethostname())
    went = rf"world 1: worker 1 \(host {host}\) raised ValueError: a bug at .*; 1 rank goes on"
    assert re.search(went, result.stderr)
    assert "killed" not in result.stderr


def test_report_has_what_the_first_one_raised_though_it_ends_last(tmp_path: Path) -> None:
    result = run_script("all", tmp_path)
    assert result.returncode == 1, result.stderr
    first = r"worker 1 \(host .*\) failed first: raised ValueError: a bug at .*\n"
    assert re.search(first, result.stderr)
    assert result.stderr.endswith("    ValueError: a bug\n"), result.stderr
