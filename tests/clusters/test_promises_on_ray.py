"""The table of promises in docs/launch.md for jobs on Ray, of fixed size and elastic.

A job with parameter servers does not run on Ray, whose ranks call a function, and have no exit
status. In a job of fixed size they are workers of Ray, which itself ends what they have started, or
leaves it. `launch.test_promises` has the rows elsewhere.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clusters.ray_clusters import cluster
from harness import base_environment
from multihost.bed import end, finish, python
from patience import Stopwatch, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

KINDS = {"fixed": {}, "elastic": {"min_np": 1, "max_np": 2}}
# Each of two ranks has a child in its own group and one in another session. It writes their ids to
# a file, and sleeps until the test ends it.
PROGRAM = """
import sys
import hvdlite.ray

def family(folder, deaf):
    import os, pathlib, signal, subprocess, time
    import hvdlite.numpy as hvd
    hvd.init()
    if deaf:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    pids = [os.getpid(), *(
        subprocess.Popen(["sleep", "600"], start_new_session=session).pid
        for session in (False, True)
    )]
    file = pathlib.Path(folder, f"ready.{os.getpid()}")
    part = file.with_name(f"part.{os.getpid()}")
    part.write_text(" ".join(map(str, pids)))
    part.rename(file)
    while True:
        time.sleep(0.05)

folder, deaf, settings = sys.argv[1], *map(eval, sys.argv[2:])
hvdlite.ray.run(family, (folder, deaf), num_workers=2, **settings)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster with 2 CPUs."""
    ray = pytest.importorskip("ray")
    with cluster(cpus=2):
        yield ray.get_runtime_context().gcs_address


class Job:
    """A program that calls `hvdlite.ray.run` with two ranks."""

    def __init__(self, address: str, kind: str, folder: Path, deaf: bool) -> None:
        self._folder = folder
        # Of each family these are ours to end; what a worker of Ray has started is Ray's.
        self._ours = slice(1) if kind == "fixed" else slice(None)
        self.program = subprocess.Popen(
            python(PROGRAM, folder, deaf, KINDS[kind]),
            env={**base_environment(), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wait_until(lambda: len(self.families()) == 2 or self.program.poll() is not None, "ranks")
        assert self.program.poll() is None, finish(self.program)

    def families(self, members: slice = slice(None)) -> list[list[psutil.Process]]:
        """List, for each rank that has ever been ready, those of it and its children that live."""
        texts = [path.read_text() for path in self._folder.glob("ready.*[0-9]")]
        return [list(living(map(int, text.split()[members]))) for text in texts]

    def left(self) -> list[psutil.Process]:
        """List what lives of the job and is ours to end."""
        return [one for family in self.families(self._ours) for one in family]

    def kill(self) -> None:
        """Kill the program: children with a session of their own may outlive it."""
        self.program.kill()
        self._ours = slice(min(2, self._ours.stop or 2))

    def wait_until_gone(self) -> float:
        """Wait until nothing is left; return how many seconds this took."""
        watch = Stopwatch()
        wait_until(lambda: not self.left(), "the end of the ranks")
        return watch.seconds()


def living(pids: Any) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


Start = Callable[..., Job]


@pytest.fixture
def start(address: str, tmp_path: Path) -> Iterator[Start]:
    """Start a job; at the end nothing may be left of it."""
    jobs: list[Job] = []

    def start_job(kind: str, deaf: bool = False) -> Job:
        jobs.append(Job(address, kind, tmp_path, deaf))
        return jobs[-1]

    yield start_job
    for job in jobs:
        end(job.program)
        job.wait_until_gone()
        for left in [one for family in job.families() for one in family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


@pytest.mark.parametrize(
    ("kind", "number"),
    [("fixed", signal.SIGINT), ("elastic", signal.SIGINT), ("elastic", signal.SIGTERM)],
)
def test_signal_ends_ranks_and_their_children(start: Start, kind: str, number: int) -> None:
    job = start(kind)
    job.program.send_signal(number)
    assert job.wait_until_gone() <= 10.0
    _, _, stderr, _ = finish(job.program)
    assert number != signal.SIGINT or stderr.rstrip().endswith("KeyboardInterrupt"), stderr


@pytest.mark.parametrize("kind", KINDS)
def test_death_of_the_program_ends_ranks_and_their_children(start: Start, kind: str) -> None:
    job = start(kind, deaf=True)
    job.kill()
    assert job.wait_until_gone() <= 4.0
