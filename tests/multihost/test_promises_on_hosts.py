"""The table of promises in docs/launch.md on two hosts, for every kind of job and way to a host.

The hosts are reached by ssh, by srun in an allocation of a real Slurm, or in node mode, in which
hvdlite-run is started on each of them. `launch.test_promises` has the rows on one host.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusters.conftest import slurm
from clusters.slurm import Slurm
from harness import base_environment
from hvdlite.launch.process.processes import processes_with
from launch.marked import SLEEPER
from launch.test_node_jobs import ELASTIC
from launch.test_promises import DEAF, DRIVER, ENDS, FAMILY, GROUP, KINDS
from multihost.bed import MARK, end, finish, python
from patience import Stopwatch, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]

__all__ = ["slurm"]  # pytest finds this fixture here.
WAYS = ("ssh", "srun", "nodes")
AGENT = "hvdlite.launch.agent"
WAITS = """
import os, time
print("ready", flush=True)
while not os.path.exists(os.path.join(os.environ["TEST_FOLDER"], "end")):
    time.sleep(0.02)
"""
# Programs that go on without the last rank where their kind of job does, until there is a file.
LASTING = {"fixed": WAITS, "elastic": ELASTIC, "servers": WAITS}


class Job:
    """A job of two ranks on the first host and one on the second; node 0 shows all output."""

    def __init__(self, slurm: Slurm, kind: str, way: str, folder: Path, code: str) -> None:
        self.hosts = slurm.hosts
        self._way = way
        self.noun = "workers" if kind == "elastic" else "ranks"
        self._mark = f"TEST_MARK={folder}"
        env = base_environment() | {
            "OMP_NUM_THREADS": "1",
            "HVDLITE_TOKEN": secrets.token_hex(32),
            "TEST_FOLDER": str(folder),
            "TEST_MARK": str(folder),
        }
        last = (*KINDS[kind], *python(code))
        run = (sys.executable, *DRIVER)
        if way == "srun":
            allocation = ("salloc", "-Q", "-N2", "--ntasks=3")
            command = (*allocation, *run, "--via", "srun", *last)
            self.started = [slurm.start(*command, env=env, cwd=folder)]
        elif way == "ssh":
            hosts = ("-H", "node1:2,node2:1", "--ssh-config", str(self.hosts.ssh_config))
            self.started = [slurm.start(*run, "-np", "3", *hosts, *last, env=env, cwd=folder)]
        else:
            where = ("--nodes", "2", "--meet", "node1:23456", "--node-rank")
            self.started = [
                slurm.start(
                    *(*run, *where, str(node), "-np", str(ranks), *last),
                    env=env,
                    cwd=folder,
                    host=node,
                )
                for node, ranks in ((0, 2), (1, 1))
            ]

    def alive(self) -> list[int]:
        """List the processes of the job on both hosts, without those that started it."""
        # sshd does not pass the mark on.
        agents = self.hosts.processes(1, AGENT) if self._way == "ssh" else []
        return [*processes_with(self._mark), *(pid for pid in agents if runs(pid, "-m", AGENT))]

    def wait_until_ready(self) -> None:
        """Read stdout until three ranks have said that they are ready."""
        stdout, stderr = self.started[0].stdout, self.started[0].stderr
        assert stdout is not None and stderr is not None
        ready = 0
        while ready < 3:
            line = stdout.readline()
            if not line:
                raise AssertionError(stderr.read().decode())
            ready += b"ready" in line

    def wait_for_stderr(self, words: str) -> None:
        """Read stderr up to the line that has these words."""
        stderr = self.started[0].stderr
        assert stderr is not None
        assert any(words.encode() in line for line in stderr), f"nobody wrote {words!r}"

    def signal(self, number: int) -> None:
        """Send a signal to hvdlite-run itself, on the first host."""
        (launcher,) = [pid for pid in self.alive() if is_launcher(pid)]
        os.kill(launcher, number)

    def kill_agent(self) -> None:
        """Kill what starts and watches the ranks of the second host there."""
        words = ("--node-rank", "1") if self._way == "nodes" else ("-m", AGENT)
        (agent,) = [pid for pid in self.alive() if runs(pid, *words)]
        os.kill(agent, signal.SIGKILL)

    def finish(self) -> tuple[list[int], str, str, float]:
        """Wait for the end; return the statuses of all nodes, and what the first one has shown."""
        ended = [finish(one) for one in self.started]
        return [one[0] for one in ended], *ended[0][1:]


def is_launcher(pid: int) -> bool:
    """Return whether a process is hvdlite-run, and in node mode that of node 0."""
    return runs(pid, *DRIVER) and not runs(pid, "--node-rank", "1")


def runs(pid: int, *words: str) -> bool:
    """Return whether a process is Python whose command line has these words in turn."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False  # It has ended.
    places = range(len(command))
    return command[0] == sys.executable and list(words) in [
        command[i : i + len(words)] for i in places
    ]


Start = Callable[..., Job]


@pytest.fixture
def start(slurm: Slurm, tmp_path: Path) -> Iterator[Start]:
    """Start a job; at the end nothing may be left of it."""
    jobs: list[Job] = []

    def start_job(kind: str, way: str, code: str) -> Job:
        jobs.append(Job(slurm, kind, way, tmp_path, code))
        jobs[-1].wait_until_ready()
        return jobs[-1]

    yield start_job
    slurm.hosts.mend()
    for job in jobs:
        for one in job.started:
            end(one)
        wait_until(lambda job=job: not job.alive(), "the end of all processes of the job")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_sigterm_ends_ranks_and_their_children(start: Start, kind: str, way: str) -> None:
    job = start(kind, way, FAMILY)
    assert len(job.alive()) >= 3 * 4
    job.signal(signal.SIGTERM)
    statuses, stdout, stderr, _ = job.finish()
    assert statuses == [143] * len(job.started), stderr
    assert stdout == ""
    assert f"hvdlite-run: SIGTERM: stopping 3 {job.noun} (again to kill them at once)" in stderr
    wait_until(lambda: not job.alive(), "the end of all processes of the job")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_second_ctrl_c_kills_ranks_and_their_children(start: Start, kind: str, way: str) -> None:
    job = start(kind, way, DEAF + FAMILY)
    job.signal(signal.SIGINT)
    job.wait_for_stderr(f"Ctrl-C: stopping 3 {job.noun} (again to kill them at once)")
    job.signal(signal.SIGINT)
    watch = Stopwatch()
    statuses, _, stderr, _ = job.finish()
    assert statuses == [130] * len(job.started), stderr
    assert watch.seconds() <= 4.0
    wait_until(lambda: not job.alive(), "the end of all processes of the job")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_death_of_the_launcher_ends_ranks_and_their_groups(
    start: Start, kind: str, way: str
) -> None:
    job = start(kind, way, DEAF + GROUP)
    job.signal(signal.SIGKILL)
    watch = Stopwatch()
    wait_until(lambda: not job.alive(), "the end of all processes of the job")
    assert watch.seconds() <= 4.0
    _, *others = [finish(one) for one in job.started]
    assert [status for status, _, _, _ in others] == [1] * (way == "nodes")
    for _, _, stderr, _ in others:
        assert "node 1 of 2 has lost node 0 at node1:23456: it has hung up" in stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_status_is_75_if_a_rank_stops_and_the_others_end_well(
    start: Start, tmp_path: Path, kind: str, way: str
) -> None:
    job = start(kind, way, ENDS)
    (tmp_path / "end").touch()
    statuses, _, stderr, _ = job.finish()
    assert statuses == [75] * len(job.started), stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_rank_that_dies_is_named_and_ends_only_a_job_of_fixed_size(
    start: Start, tmp_path: Path, kind: str, way: str
) -> None:
    job = start(kind, way, LASTING[kind])
    (rank,) = job.hosts.processes(1, MARK)
    watch = Stopwatch()
    os.kill(rank, signal.SIGKILL)
    if kind != "fixed":
        job.wait_for_stderr("worker 2 (host node2")
        (tmp_path / "end").touch()
    statuses, stdout, stderr, _ = job.finish()
    assert statuses == [0 if kind != "fixed" else 137] * len(job.started), stderr
    assert kind != "elastic" or stdout.count("done with") >= 2
    if kind == "fixed":
        assert watch.seconds() <= 4.0
        assert re.search(r"rank 2 \(host node2.*, pid \d+\) failed first: killed by SIG", stderr)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_connection_that_breaks_ends_only_a_job_of_fixed_size(
    start: Start, tmp_path: Path, kind: str, way: str
) -> None:
    job = start(kind, way, LASTING[kind])
    watch = Stopwatch()
    job.kill_agent()
    if kind != "fixed":
        job.wait_for_stderr("node2")
        (tmp_path / "end").touch()
    statuses, _, stderr, _ = job.finish()
    assert statuses[0] == (0 if kind != "fixed" else 255), stderr
    if kind == "fixed":
        assert watch.seconds() <= 5.0
        assert re.search(r"rank 2 \(host node2.* lost the connection to its host", stderr)


# Each kind of job and each way has one row, since a host that is lost takes its time.
def test_silent_host_ends_the_job_and_its_own_ranks(start: Start) -> None:
    job = start("fixed", "srun", SLEEPER)
    job.hosts.drop(1, "input", "output")
    watch = Stopwatch()
    job.wait_for_stderr("node2")
    assert watch.seconds() <= 20.0
    statuses, _, stderr, _ = job.finish()
    assert statuses == [255], stderr
    wait_until(lambda: not job.alive(), "the end of the rank there")
    assert watch.seconds() <= 35.0 + 20.0


@pytest.mark.parametrize(
    ("kind", "way", "code"),
    [("elastic", "nodes", ELASTIC), ("servers", "ssh", SLEEPER)],
    ids=["elastic by nodes", "servers by ssh"],
)
def test_silent_host_is_named_and_the_others_go_on(
    start: Start, kind: str, way: str, code: str
) -> None:
    job = start(kind, way, code)
    job.hosts.drop(1, "input", "output")
    watch = Stopwatch()
    job.wait_for_stderr("node2")
    assert watch.seconds() <= 20.0
    assert len(job.hosts.processes(0, MARK)) == 2
    job.signal(signal.SIGTERM)
    status, _, stderr, _ = finish(job.started[0])
    assert status == 143, stderr
