"""hvdlite-run --servers: workers die and come back, and a server's end is the end of the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from fakes.ssh import fake_ssh
from launch.marked import MarkedJob, process_state, python
from patience import wait_until

DRIVER = (str(Path(__file__).with_name("driver.py")),)
# What every process begins with. A server serves until SIGTERM, and then saves.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
number, folder = int(os.environ["HVDLITE_WORKER"]), Path(os.environ["TEST_FOLDER"])
names = "HVDLITE_SERVERS HVDLITE_RANK HVDLITE_SIZE HVDLITE_JOINER HVDLITE_HOSTNAME"
def say(*words):  # in one write, because children of a worker share its stdout
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
def save(*_):
    say("saved")
    sys.exit(0)
if number < int(os.environ["HVDLITE_SERVERS"]):
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
say("ready", os.getpid(), *[os.environ.get(name, "-") for name in names.split()])
if number < int(os.environ["HVDLITE_SERVERS"]):
    wait_for("leave.%d" % number)
    sys.exit(int((folder / ("leave.%d" % number)).read_text()))
"""


class ServersJob(MarkedJob):
    """A job with two servers, whose workers run `code`; `folder` has its files."""

    def __init__(self, folder: Path, workers: int, code: str, *flags: str, **env: str) -> None:
        self.folder = folder
        env = {"TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1", **env}
        command = ["--servers", "2", *flags, *python(PRELUDE + code)]
        super().__init__(2 + workers, *command, program=DRIVER, env=env)
        self.ready: dict[int, list[str]] = {}  # by process: what it said of itself
        self.lines: list[str] = []

    def read_until(self, words: str) -> str:
        """Read stdout up to the line that has these words, and note who is ready."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            self.lines.append(line.decode())
            number, _, said = line.decode().partition("] ")
            if said.startswith("ready"):
                self.ready[int(number[1:])] = said.split()[1:]
            if words in line.decode():
                return line.decode()
        assert self.process.stderr is not None
        raise AssertionError(f"{words!r} never came: {self.process.stderr.read()!r}")

    def pid(self, number: int) -> int:
        """Return the process id that a process said, and read up to it."""
        while number not in self.ready:
            self.read_until("ready")
        return int(self.ready[number][0])

    def make(self, name: str, text: str = "") -> None:
        """Make a file for which processes wait."""
        unseen = self.folder / f"{name}.new"
        unseen.write_text(text)
        unseen.rename(self.folder / name)


def test_worker_that_dies_is_started_again_and_servers_end_last(tmp_path: Path) -> None:
    code = """
if number == 2:
    os.setsid() if os.fork() == 0 else None
    say("family", os.getpid())
wait_for("end")
"""
    with ServersJob(tmp_path, 2, code) as job:
        job.read_until("family")
        job.read_until("family")
        first = [job.pid(number) for number in range(4)]
        before = len(job.alive())
        os.kill(first[2], signal.SIGKILL)
        again = job.pid(4)
        assert len(job.alive()) == before - 1  # its child in a session of its own has ended, too
        assert job.ready[2][1:] == ["2", "2", "4", "-", job.ready[2][5]]
        assert job.ready[4][1:5] == ["2", "2", "4", "1"]
        assert again not in first
        job.make("end")
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0, stderr
    assert "hvdlite-run: worker 2 (host " in stderr and "): killed by SIGKILL; " in stderr
    assert "; 1 of 2 workers go on or have finished, and its rank gets another one in 1" in stderr
    assert sorted(stdout.splitlines()) == ["[0] saved", "[1] saved"]


def test_server_that_stops_by_request_stops_the_workers(tmp_path: Path) -> None:
    with ServersJob(tmp_path, 1, "wait_for('end')") as job:
        job.pid(2)
        job.make("leave.0", "75")
        status, _, stderr, _ = job.finish()
    assert status == 75, stderr
    assert "server 0 stopped by request (exit status 75): stopping the workers, too" in stderr


def test_servers_may_end_before_workers_that_do_something_else(tmp_path: Path) -> None:
    code = """
wait_for("end")
if number == 3:
    raise ValueError("boom")
"""
    with ServersJob(tmp_path, 2, code) as job:
        left = [job.pid(number) for number in (0, 1)]
        for number in (2, 3):
            job.pid(number)
        for number in (0, 1):
            job.make(f"leave.{number}", "0")
        gone = ("", "Z")  # The launcher may not have reaped it yet.
        wait_until(lambda: all(process_state(pid) in gone for pid in left), "the servers' end")
        job.make("end")
        status, stdout, stderr, _ = job.finish()
    assert status == 0, stderr
    assert "exit status 1; 1 of 2 workers go on or have finished, and its rank gets no" in stderr
    assert stdout == ""


def test_servers_serve_until_interrupted_workers_have_saved(tmp_path: Path) -> None:
    code = """
try:
    say("set")
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    time.sleep(0.5)
    say("worker saved")
    sys.exit(3)
"""
    with ServersJob(tmp_path, 2, code) as job:
        for number in (0, 1):
            job.pid(number)
        for _ in range(2 - sum("set" in line for line in job.lines)):
            job.read_until("set")
        job.signal(signal.SIGINT)
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 130
    assert [line.split("] ")[1] for line in stdout.splitlines()] == ["worker saved"] * 2 + [
        "saved"
    ] * 2
    assert "Ctrl-C: stopping 4 ranks" in stderr and "failed first" not in stderr


def test_worker_that_fails_when_it_is_told_to_stop_is_not_hidden_by_another(tmp_path: Path) -> None:
    stop = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if number == 2 else 3))\n"
    with ServersJob(tmp_path, 2, f"{stop}say('set')\nwhile True: time.sleep(0.05)") as job:
        for number in (0, 1):
            job.pid(number)
        for _ in range(2 - sum("set" in line for line in job.lines)):
            job.read_until("set")
        job.signal(signal.SIGTERM)
        status, _, stderr, _ = job.finish()
    assert status == 143
    assert "by request" not in stderr


def test_processes_on_other_hosts(tmp_path: Path) -> None:
    path = fake_ssh(tmp_path)
    flags = ("-H", "localhost:1,far1:1,far2:2")
    with ServersJob(tmp_path, 2, "wait_for('end')", *flags, PATH=path) as job:
        pids = [job.pid(number) for number in range(4)]
        assert [job.ready[number][5] for number in (1, 2, 3)] == ["far1", "far2", "far2"]
        os.kill(pids[3], signal.SIGKILL)
        job.pid(4)
        assert job.ready[4][1:6] == ["2", "3", "4", "1", "far2"]
        job.make("end")
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0, stderr
    assert sorted(stdout.splitlines()) == ["[0] saved", "[1] saved"]
