"""A timeline that cannot be written any more does not end a job that trains."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher import run_launcher

SCRIPT = """
import os, shutil, signal, time
from hvdlite import basics
from hvdlite.elastic import ObjectState, run
from hvdlite.rendezvous import epochs
from hvdlite.objects import broadcast_object

@run
def train(state):
    while len(epochs.history()) < 2:
        state.step += 1
        state.check_host_updates()
        if state.step == 5 and epochs.current().worker == 1:
            parts = os.environ["HVDLITE_TIMELINE_PARTS"]
            shutil.rmtree(parts)
            open(parts, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

basics.init()
train(ObjectState(broadcast_object, basics.rank, step=0))
print("trained on", epochs.history()[1].size)  # the world of basics may follow a moment later
"""


def test_next_epoch_begins_without_a_timeline(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--max-np", "2", "--timeline-filename")
    result = run_launcher(
        *(*flags, str(tmp_path / "t.json"), sys.executable, "-c", SCRIPT),
        env={"TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert "[0] trained on 1\n" in result.stdout
    target = tmp_path / "t.epoch1.json"
    warning = f"hvdlite [0] warning: no timeline: the timeline {target} cannot be written: "
    assert warning in result.stderr
