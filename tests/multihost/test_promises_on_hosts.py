"""The table of promises in docs/launch.md on two hosts, for every kind of job and way to a host.

The hosts are reached by ssh, by srun in an allocation of a real Slurm, or in node mode, in which
hvdlite-run is started on each of them. `launch.test_promises` has the rows on one host.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusters.conftest import slurm
from clusters.slurm import Slurm
from harness import base_environment
from hvdlite.launch.process.orphan_reaper import processes_with
from launch.marked import SLEEPER
from launch.test_node_jobs import ELASTIC
from launch.test_promises import DEAF, DRIVER, ENDS, FAMILY, KINDS
from multihost.bed import MARK, end, finish, python
from patience import Stopwatch, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]

__all__ = ["slurm"]  # pytest finds this fixture here.
WAYS = ("ssh", "srun", "nodes")


class Job:
    """A job of two ranks on the first host and one on the second; node 0 shows all output."""

    def __init__(self, slurm: Slurm, kind: str, way: str, folder: Path, code: str) -> None:
        self.hosts = slurm.hosts
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
        return processes_with(self._mark)

    def wait_until_ready(self) -> None:
        """Read stdout until three ranks have said that they are ready."""
        stdout, stderr = self.started[0].stdout, self.started[0].stderr
        assert stdout is not None and stderr is not None
        for _ in range(3):
            if b"ready" not in stdout.readline():
                raise AssertionError(stderr.read().decode())

    def wait_for_stderr(self, words: str) -> None:
        """Read stderr up to the line that has these words."""
        stderr = self.started[0].stderr
        assert stderr is not None
        assert any(words.encode() in line for line in stderr), f"nobody wrote {words!r}"

    def signal(self, number: int) -> None:
        """Send a signal to hvdlite-run itself, on the first host."""
        (launcher,) = [pid for pid in self.alive() if is_launcher(pid)]
        os.kill(launcher, number)

    def finish(self) -> tuple[list[int], str, str, float]:
        """Wait for the end; return the statuses of all nodes, and what the first one has shown."""
        ended = [finish(one) for one in self.started]
        return [one[0] for one in ended], *ended[0][1:]


def is_launcher(pid: int) -> bool:
    """Return whether a process is hvdlite-run, and in node mode that of node 0."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False  # It has ended.
    other_node = ["--node-rank", "1"] in [command[i : i + 2] for i in range(len(command))]
    return command[:2] == [sys.executable, *DRIVER] and not other_node


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
def test_death_of_the_launcher_ends_ranks_and_their_children(
    start: Start, kind: str, way: str
) -> None:
    job = start(kind, way, DEAF + FAMILY)
    job.signal(signal.SIGKILL)
    watch = Stopwatch()
    wait_until(lambda: not job.alive(), "the end of all processes of the job")
    assert watch.seconds() <= 4.0
    statuses, _, _, _ = job.finish()
    assert statuses[1:] == [1] * (way == "nodes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_status_is_75_if_a_rank_stops_and_the_others_end_well(
    start: Start, tmp_path: Path, kind: str, way: str
) -> None:
    job = start(kind, way, ENDS)
    (tmp_path / "end").touch()
    statuses, _, stderr, _ = job.finish()
    assert statuses == [75] * len(job.started), stderr


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
