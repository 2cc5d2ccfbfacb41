"""The table of promises in docs/launch.md for jobs on Ray, of fixed size and elastic.

A job with parameter servers does not run on Ray, whose ranks call a function, and have no exit
status. In a job of fixed size they are workers of Ray, which itself ends what they have started, or
leaves it. `launch.test_promises` has the rows elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.ray_clusters import cluster
from harness import base_environment
from launch.marked import process_state
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


# Of a rank, its child in its group and that in another session, so many are ours to end. What a
# worker of Ray has started is Ray's.
OURS = {"fixed": 1, "elastic": 3}


@contextlib.contextmanager
def job(
    address: str, folder: Path, kind: str, deaf: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program, whose two ranks are ready; at the end nothing is left of them."""
    program = subprocess.Popen(
        python(PROGRAM, folder, deaf, KINDS[kind]),
        env={**base_environment(), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        ready = "ready.*"
        wait_until(
            lambda: len(list(folder.glob(ready))) == 2 or program.poll() is not None, "two ranks"
        )
        assert program.poll() is None, finish(program)
        yield program
    finally:
        end(program)
        for pid in alive(folder, 3):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(folder: Path, members: int) -> list[int]:
    """List, of each rank that has been ready and its children, the first ones that live."""
    families = [path.read_text().split()[:members] for path in folder.glob("ready.*")]
    pids = [int(pid) for family in families for pid in family]
    return [pid for pid in pids if process_state(pid) not in ("", "Z")]


def seconds_until_gone(folder: Path, members: int) -> float:
    watch = Stopwatch()
    wait_until(lambda: not alive(folder, members), "the end of the ranks")
    return watch.seconds()


@pytest.mark.parametrize(
    ("kind", "number"),
    [("fixed", signal.SIGINT), ("elastic", signal.SIGINT), ("elastic", signal.SIGTERM)],
)
def test_signal_ends_ranks_and_their_children(
    address: str, tmp_path: Path, kind: str, number: int
) -> None:
    with job(address, tmp_path, kind) as program:
        program.send_signal(number)
        assert seconds_until_gone(tmp_path, OURS[kind]) <= 10.0
        _, _, stderr, _ = finish(program)
        assert number != signal.SIGINT or stderr.rstrip().endswith("KeyboardInterrupt"), stderr


@pytest.mark.parametrize("kind", KINDS)
def test_death_of_the_program_ends_ranks_and_their_children(
    address: str, tmp_path: Path, kind: str
) -> None:
    with job(address, tmp_path, kind, deaf=True) as program:
        program.kill()
        # Children with a session of their own may outlive it.
        assert seconds_until_gone(tmp_path, min(2, OURS[kind])) <= 4.0
