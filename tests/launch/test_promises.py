"""The table of promises in docs/launch.md: its rows hold for every kind of job, here and by ssh.

What a kind of job does besides (workers that are replaced, servers that end last) has tests of its
own in `elastic` and `servers`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fakes.ssh import fake_ssh
from launch.marked import MarkedJob, python
from patience import HANG, Stopwatch

BOUND = 2.0
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
# Its servers wait only a moment for the end of their own after the last worker has ended.
DRIVER = (str(Path(__file__).parent / "servers" / "driver.py"),)
KINDS = {"fixed": (), "elastic": ("--min-np", "1"), "servers": ("--servers", "1")}
HOSTS = {"here": (), "ssh": ("-H", "localhost:1,far1:2")}
# A rank with a child in its own group and a forked copy of itself.
GROUP = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
if os.fork() == 0:
    while True:
        time.sleep(0.05)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
# It also has a child in another session.
FAMILY = f"""
import subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True)
{GROUP}"""
DEAF = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""
# Each rank says that it was told, and goes on; its child, which would end, is not told.
TOLD = """
import os, signal, time
if os.fork() > 0:
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"told, and ready\\n"))
os.write(1, b"ready\\n")
while True:
    time.sleep(0.05)
"""
# The last rank asks for another job that goes on from here.
ENDS = """
import os, sys, time
print("ready", flush=True)
while not os.path.exists(os.path.join(os.environ["TEST_FOLDER"], "end")):
    time.sleep(0.02)
number = os.environ.get("HVDLITE_WORKER") or os.environ["HVDLITE_RANK"]
sys.exit(75 if number == "2" else 0)
"""
TALKER = """
import itertools, signal, sys
def complain(*_):
    sys.stderr.write("the other rank has died\\n")
    sys.exit(1)
signal.signal(signal.SIGTERM, complain)
for i in itertools.count(): print('line', i)
"""


class Jobs:
    """Starts jobs of three ranks of one kind, on some hosts."""

    def __init__(self, kind: str, hosts: str, folder: Path) -> None:
        self._flags = (*KINDS[kind], *HOSTS[hosts])
        self._env = {"OMP_NUM_THREADS": "1", "TEST_FOLDER": str(folder)}
        if hosts == "ssh":
            self._env["PATH"] = fake_ssh(folder)
        self.kind = kind
        self.noun = "workers" if kind == "elastic" else "ranks"

    def start(self, code: str) -> MarkedJob:
        return MarkedJob(3, *self._flags, *python(code), program=DRIVER, env=self._env)


# Each kind has its rows at one of the places.
@pytest.fixture(params=[("fixed", "ssh"), ("elastic", "here"), ("servers", "ssh")])
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> Jobs:
    return Jobs(*request.param, folder=tmp_path)


@pytest.mark.parametrize("number", NAMES)
def test_signal_ends_ranks_and_their_children(jobs: Jobs, number: signal.Signals) -> None:
    with jobs.start(FAMILY) as job:
        job.wait_until_ready(3)
        assert len(job.alive()) >= 3 * 4
        job.signal(number)
        status, stdout, stderr, seconds = job.finish()
        assert job.alive() == []
    assert status == 128 + number
    assert seconds <= BOUND
    assert stdout == ""
    # On a crowded machine the ranks may need more than the 2 s after which they are named.
    own = [line for line in stderr.splitlines() if line.startswith("hvdlite-run: ")]
    (line,) = [line for line in own if "waiting up to" not in line]
    told = f"{NAMES[number]}: stopping 3 {jobs.noun} (again to kill them at once)"
    assert line == f"hvdlite-run: {told}"
    if number != signal.SIGINT:
        assert len(stderr.splitlines()) == len(own)


def test_second_signal_kills_at_once(jobs: Jobs) -> None:
    with jobs.start(DEAF + FAMILY) as job:
        job.wait_until_ready(3)
        job.signal(signal.SIGINT)
        job.wait_for_stderr(f"stopping 3 {jobs.noun}")
        job.signal(signal.SIGINT)
        status, _, _, seconds = job.finish()
        assert job.seconds_until_gone() <= BOUND  # A killed process needs a core to end.
    assert status == 130
    assert seconds <= 0.8


def test_sigusr1_reaches_ranks_and_not_their_children_and_the_job_goes_on(jobs: Jobs) -> None:
    with jobs.start(TOLD) as job:
        job.wait_until_ready(6)
        before = len(job.alive())
        job.signal(signal.SIGUSR1)
        job.wait_until_ready(3)
        assert len(job.alive()) == before
        job.signal(signal.SIGTERM)
        status, stdout, _, _ = job.finish()
        assert job.alive() == []
    assert (status, stdout) == (143, "")


def test_death_of_the_launcher_ends_ranks_and_their_groups(jobs: Jobs) -> None:
    with jobs.start(DEAF + GROUP) as job:
        job.wait_until_ready(3)
        job.signal(signal.SIGKILL)
        assert job.seconds_until_gone() <= BOUND


def test_reader_that_goes_away_ends_the_job_quietly(jobs: Jobs) -> None:
    with jobs.start(TALKER) as job:
        assert job.process.stdout is not None and job.process.stderr is not None
        job.process.stdout.read(1000)
        watch = Stopwatch()
        job.process.stdout.close()
        assert job.process.wait(timeout=HANG) == 141
        assert watch.seconds() <= 2.0
        stderr = job.process.stderr.read().decode()
        assert job.alive() == []
    assert "has died" not in stderr
    assert "Traceback" not in stderr


def test_status_is_75_if_a_rank_stops_and_the_others_end_well(jobs: Jobs, tmp_path: Path) -> None:
    with jobs.start(ENDS) as job:
        job.wait_until_ready(3)
        (tmp_path / "end").touch()
        status, _, stderr, _ = job.finish()
    assert status == 75, stderr
    who = "worker 2" if jobs.kind != "fixed" else "rank 2"
    assert f"{who} stopped by request (exit status 75)" in stderr
