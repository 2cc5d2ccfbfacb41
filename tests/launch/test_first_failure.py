"""The first failure ends the job, and the launcher's last lines report it."""

from __future__ import annotations

import re
from pathlib import Path

from launch.marked import MarkedJob, python

BOUND = 3.0
# What each rank begins with: functions that wait for a file, and for the end of another rank.
DEFINITIONS = """
import os, signal, sys, time, traceback
from pathlib import Path
rank, folder = os.environ["HVDLITE_RANK"], Path(os.environ["TEST_FOLDER"])
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
def wait_for_end_of(rank):
    stat = Path("/proc", (folder / f"pid.{rank}").read_text(), "stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
"""
# Then it waits until all ranks are ready.
BEGIN = """
(folder / f"pid.{rank}").write_text(str(os.getpid()))
print("ready", flush=True)
wait_for("go")
"""
PRELUDE = DEFINITIONS + BEGIN
WAIT_IN_SHELL = 'while [ ! -e "$TEST_FOLDER/go" ]; do sleep 0.01; done'


def run(folder: Path, np: int, *command: str) -> tuple[int, str, str, float]:
    """Run ranks that print "ready", and then wait for the file `go`.

    Returns:
        The launcher's status, stdout and stderr, and the seconds since all ranks may go on.
    """
    with MarkedJob(np, *command, env={"TEST_FOLDER": str(folder)}) as job:
        job.wait_until_ready(np)
        job.event()
        (folder / "go").touch()
        ended = job.finish()
        assert job.alive() == []
    return ended


# Ranks 0 and 1 fail as a consequence. Rank 2 ends as soon as it can after it has raised, since the
# launcher waits only for a second and a half.
CONSEQUENCES = """
class RankFailedError(Exception):
    __module__ = "hvdlite.errors"
if rank != "2":
    raise RankFailedError("rank 2 raised ValueError: the cause")
for other in (0, 1):
    wait_for_end_of(other)
time.sleep(SECONDS)
try:
    raise ValueError("the cause")
except ValueError:
    traceback.print_exc()
    os._exit(1)
"""


def test_cause_that_is_slow_to_end_is_still_blamed(tmp_path: Path) -> None:
    # Half a second is the time that there is after other failures.
    code = PRELUDE + "SECONDS = 0.75" + CONSEQUENCES
    _, _, stderr, seconds = run(tmp_path, 3, *python(code))
    assert "hvdlite-run: rank 2 (host" in stderr
    assert stderr.endswith("    ValueError: the cause\n")
    assert seconds <= BOUND + 1.0


def test_rank_that_ends_well_does_not_end_the_others(tmp_path: Path) -> None:
    code = 'if rank != "0":\n    wait_for_end_of(0); time.sleep(1.0); print("finished")'
    status, stdout, _, _ = run(tmp_path, 3, *python(PRELUDE + code))
    assert status == 0
    assert sorted(stdout.splitlines()) == ["[1] finished", "[2] finished"]


def test_rank_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = "sys.exit(5) if rank == '0' else time.sleep(600)"
    status, _, stderr, seconds = run(tmp_path, 3, *python(deaf + PRELUDE + code))
    assert status == 5
    assert seconds <= BOUND
    assert "rank 0" in stderr


def test_survivors_have_a_moment_to_say_what_they_saw(tmp_path: Path) -> None:
    # A survivor has the time from the death to SIGTERM.
    told = """
def told(*_):
    seconds = time.monotonic() - float((folder / "dies").read_text())
    os.write(1, f"seen by {rank} after {seconds}\\n".encode())
    os._exit(0)
signal.signal(signal.SIGTERM, told)
"""
    code = """
if rank == "1":
    (folder / "dies").write_text(str(time.monotonic()))
    os.kill(os.getpid(), 9)
while True:
    time.sleep(0.05)
"""
    status, stdout, _, _ = run(tmp_path, 3, *python(DEFINITIONS + told + BEGIN + code))
    assert status == 137
    seen = [line.rpartition(" after ") for line in sorted(stdout.splitlines())]
    assert [line[0] for line in seen] == ["[0] seen by 0", "[2] seen by 2"]
    assert all(float(line[2]) >= 0.5 for line in seen), stdout


def test_wrapper_scripts_and_their_children_end_too(tmp_path: Path) -> None:
    fails = f'[ "$HVDLITE_RANK" = 1 ]; then echo ready; {WAIT_IN_SHELL}; exit 4'
    wrapper = f"if {fails}; fi; sleep 600 & echo ready; sleep 600"
    status, _, _, seconds = run(tmp_path, 3, "sh", "-c", wrapper)
    assert status == 4
    assert seconds <= BOUND


def test_background_process_may_finish_its_work_first(tmp_path: Path) -> None:
    code = """
def told(*_):
    os.write(1, f"told by SIGTERM after {time.monotonic() - ended} s\\n".encode())
    os._exit(0)
signal.signal(signal.SIGTERM, told)
ended = time.monotonic()
if os.fork() == 0:
    os.write(1, b"cleaned up\\n")
    while True:
        time.sleep(0.05)
os._exit(0)
"""
    status, stdout, _, _ = run(tmp_path, 1, *python(PRELUDE + code))
    assert status == 0
    assert stdout.startswith("[0] cleaned up\n")
    match = re.search(r"^\[0\] told by SIGTERM after (.*) s$", stdout, re.MULTILINE)
    assert match and float(match[1]) >= 1.0
