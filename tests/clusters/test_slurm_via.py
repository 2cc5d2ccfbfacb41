"""`hvdlite-run --via srun` in an allocation of a real Slurm."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusters.slurm import Slurm
from harness import base_environment
from hvdlite.launch.process import processes_with
from launch.marked import DEAF_SLEEPER
from launcher import run_launcher
from multihost.bed import end, finish, python
from patience import Stopwatch, wait_until

pytestmark = pytest.mark.slurm

STEPPER = [sys.executable, str(Path(__file__).with_name("stepper.py"))]
SHOW = (
    "import os, socket; from hvdlite import basics; basics.init();"
    "print(basics.rank(), basics.size(), basics.local_rank(), basics.cross_rank(),"
    " socket.gethostname(), os.environ['HVDLITE_HOSTNAME'], os.environ['TEST_MARK'] != '')"
)


class Allocation:
    """hvdlite-run in an allocation of both nodes, started by salloc."""

    def __init__(self, slurm: Slurm, folder: Path, arguments: tuple[str, ...], tasks: str) -> None:
        self.mark = f"TEST_MARK={folder}"
        environment = {**base_environment(), "OMP_NUM_THREADS": "1", "TEST_MARK": str(folder)}
        command = [sys.executable, "-m", "hvdlite.launch", "--via", "srun", *arguments]
        self.process = slurm.start(
            *("salloc", "-Q", "-N2", f"--ntasks={tasks}", *command), env=environment, cwd=folder
        )

    def wait_until(self, word: bytes, count: int) -> None:
        """Read stdout until `count` lines with the word have come."""
        assert self.process.stdout is not None
        while count:
            line = self.process.stdout.readline()
            if not line:
                assert self.process.stderr is not None
                raise AssertionError(self.process.stderr.read().decode())
            count -= word in line

    def processes(self, *words: bytes) -> list[int]:
        """List the processes of the job whose command line has all these words."""
        found = []
        for pid in processes_with(self.mark):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # It has ended.
            if set(words).issubset(command):
                found.append(pid)
        return found

    def finish(self) -> tuple[int, str, str, float]:
        return finish(self.process)

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not processes_with(self.mark), "the end of all processes of the job")


@pytest.fixture
def start(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Allocation]]:
    """Start hvdlite-run in an allocation; at the end nothing may be left of it."""
    started: list[Allocation] = []

    def start_job(*arguments: str, tasks: str = "4") -> Allocation:
        started.append(Allocation(slurm, tmp_path, arguments, tasks))
        return started[-1]

    yield start_job
    for one in started:
        end(one.process)
        one.assert_nothing_is_left()


def test_hosts_and_slots_are_those_of_the_allocation(start: Callable[..., Allocation]) -> None:
    status, stdout, stderr, _ = start(*python(SHOW), tasks="3").finish()
    assert status == 0, stderr
    assert sorted(stdout.splitlines()) == [
        "[0] 0 3 0 0 node1 node1 True",
        "[1] 1 3 1 0 node1 node1 True",
        "[2] 2 3 0 1 node2 node2 True",
    ]
    assert stderr == ""


def test_without_an_allocation_it_says_what_to_do() -> None:
    done = run_launcher("--via", "srun", "-np", "2", *python(SHOW), env={"SLURM_JOB_NODELIST": ""})
    assert done.returncode == 2
    assert "--via srun: SLURM_JOB_NODELIST is not set; run hvdlite-run in an" in done.stderr


def test_signal_stops_all_ranks_at_one_step(
    start: Callable[..., Allocation], tmp_path: Path
) -> None:
    job = start(*STEPPER)
    job.wait_until(b"begins at", 4)
    (launcher,) = job.processes(b"hvdlite.launch", b"srun", b"--via")[-1:]
    os.kill(launcher, signal.SIGTERM)
    status, stdout, stderr, _ = job.finish()
    assert status == 75, stderr
    assert len({(tmp_path / f"saved.{rank}").read_text() for rank in range(4)}) == 1, stdout


def test_signal_to_the_agent_of_a_host_stops_the_job(start: Callable[..., Allocation]) -> None:
    job = start(*STEPPER)
    job.wait_until(b"begins at", 4)
    (agent,) = agents(job)
    os.kill(agent, signal.SIGTERM)
    status, _, stderr, _ = job.finish()
    assert status == 75, stderr
    assert "hvdlite-run: SIGTERM on host node2: stopping 4 ranks" in stderr


def test_death_of_the_launcher_ends_all_ranks(
    start: Callable[..., Allocation],
) -> None:
    job = start(*python(DEAF_SLEEPER))
    job.wait_until(b"ready", 4)
    (launcher,) = job.processes(b"hvdlite.launch", b"srun", b"--via")[-1:]
    os.kill(launcher, signal.SIGKILL)
    watch = Stopwatch()
    job.assert_nothing_is_left()
    assert watch.seconds() <= 4.0


def agents(job: Allocation) -> list[int]:
    """List the agents themselves, without the srun and the shim that carry their command."""
    return [
        pid
        for pid in job.processes(b"hvdlite.launch.agent", b"-m")
        if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def test_node_mode_as_a_step_with_one_task_on_each_node(slurm: Slurm, tmp_path: Path) -> None:
    mark = f"TEST_MARK={tmp_path}"
    node = [sys.executable, "-m", "hvdlite.launch", "--nodes", "auto", "-np", "2", *STEPPER]
    env = {**base_environment(), "OMP_NUM_THREADS": "1", "TEST_MARK": str(tmp_path)}
    step = slurm.start(
        *("srun", "-N2", "--ntasks-per-node=1", "--overcommit", *node),
        env={**env, "HVDLITE_TOKEN": secrets.token_hex(32)},
        cwd=tmp_path,
    )
    try:
        assert step.stdout is not None
        for _ in range(4):
            assert b" of 4 on node" in step.stdout.readline()
        slurm.run("scancel", "--signal=TERM", newest_job(slurm))
        status, stdout, stderr, _ = finish(step)
    finally:
        end(step)
    assert status == 75, stdout + stderr
    assert len({(tmp_path / f"saved.{rank}").read_text() for rank in range(4)}) == 1, stdout
    wait_until(lambda: not processes_with(mark), "the end of all processes of the job")


def newest_job(slurm: Slurm) -> str:
    return slurm.run("squeue", "--noheader", "--format=%i", "--sort=-i").stdout.split()[0]
