"""A worker is killed before the first step, or after the last one: the job succeeds."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher import LauncherResult, run_launcher

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from hvdlite import basics
from hvdlite.elastic import ObjectState, run
from hvdlite.objects import broadcast_object
from hvdlite.rendezvous import membership

folder, where, worker = Path(sys.argv[1]), sys.argv[2], os.environ["HVDLITE_WORKER"]

def has_ended():
    try:
        state = Path("/proc", (folder / "pid").read_text(), "stat").read_text()
    except OSError:
        return (folder / "pid").exists()
    return state.rpartition(")")[2].split()[0] == "Z"

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

@run
def train(state):
    while state.step < 5:
        state.step += broadcast_object(1, 0)
        state.commit()

if worker == "1" and where == "while it connects":
    membership.Mesh = die
basics.init()
train(ObjectState(broadcast_object, basics.rank, step=0))
print("size", basics.size(), flush=True)
basics.shutdown()
if worker == "0":
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
elif where == "after the others":
    while not has_ended():
        time.sleep(0.01)
    die()
"""


def run_job(folder: Path, where: str) -> LauncherResult:
    flags = ("-np", "2", "--min-np", "1", "--max-np", "2")
    done = run_launcher(*flags, sys.executable, "-c", SCRIPT, str(folder), where)
    assert done.returncode == 0, done.stderr
    return done


def test_worker_that_is_killed_while_it_connects_is_replaced(tmp_path: Path) -> None:
    done = run_job(tmp_path, "while it connects")
    assert done.stdout.count("size 2\n") == 2
    assert "died of SIGKILL, and is replaced before the first step\n" in done.stderr


def test_worker_that_is_killed_after_its_work_does_not_fail_the_job(tmp_path: Path) -> None:
    done = run_job(tmp_path, "after the others")
    assert done.stdout.count("size 2\n") == 2
    assert "died of SIGKILL after its goodbye, when its work was done" in done.stderr
