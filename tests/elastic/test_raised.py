"""A worker whose script has raised, and whose process takes longer than the heartbeat to end."""

from __future__ import annotations

import re
import socket
import sys

from launcher import run_launcher

SCRIPT = """
import atexit, sys, threading, time
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
            end_late(2.0)
            raise ValueError("a bug")
    if sys.argv[1] == "all":
        raise ValueError("another bug")
    time.sleep(3.0)  # much longer than the heartbeat

basics.init()
train(ObjectState(broadcast_object, basics.rank, step=0))
"""
FLAGS = ("-np", "2", "--min-np", "1", "--max-np", "2", "--elastic-heartbeat", "0.5")


def test_process_that_ends_late_is_not_killed_and_does_not_hold_up_the_others() -> None:
    result = run_launcher(*FLAGS, sys.executable, "-c", SCRIPT, "one", timeout=60.0)
    assert result.returncode == 0, result.stderr
    host = re.escape(socket.gethostname())
    went = rf"epoch 1: worker 1 \(host {host}\) raised ValueError: a bug at .*; 1 rank goes on"
    assert re.search(went, result.stderr)
    assert "killed" not in result.stderr


def test_report_has_what_the_first_one_raised_though_it_ends_last() -> None:
    result = run_launcher(*FLAGS, sys.executable, "-c", SCRIPT, "all", timeout=60.0)
    assert result.returncode == 1, result.stderr
    first = r"worker 1 \(host .*\) failed first: raised ValueError: a bug at .*\n"
    assert re.search(first, result.stderr)
    assert result.stderr.endswith("    ValueError: a bug\n"), result.stderr
