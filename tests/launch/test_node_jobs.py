"""Node mode of elastic jobs and of jobs with parameter servers: two nodes, both on this machine."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from faults.ports import free_port
from launch.marked import MarkedJob, python
from patience import wait_until

# A worker trains until there is a file `end`, and tells its process id when it has begun. Rank 0
# tells how large each world is.
ELASTIC = """
import os, time
from hvdlite import basics
from hvdlite.elastic.run import run
from hvdlite.elastic.state import ObjectState
from hvdlite.objects import broadcast_object
basics.init()
state = ObjectState(broadcast_object, basics.rank, step=0, size=0)
print("ready", os.environ["HVDLITE_WORKER"], os.getpid(), flush=True)
@run
def train(state):
    while not broadcast_object(os.path.exists(os.path.join(os.environ["TEST_FOLDER"], "end"))):
        if state.size != basics.size() and basics.rank() == 0:
            print("world of", basics.size(), flush=True)
        state.size = basics.size()
        state.step += 1
        state.check_host_updates()
        time.sleep(0.02)
train(state)
print("done with", basics.size(), flush=True)
"""
SERVERS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
names = "HVDLITE_WORKER HVDLITE_RANK HVDLITE_SIZE HVDLITE_SERVERS"
print("ready", *[os.environ[name] for name in names.split()], os.getpid(), flush=True)
while os.environ["HVDLITE_RANK"] == "0" or not os.path.exists(os.environ["TEST_FOLDER"] + "/end"):
    time.sleep(0.02)
"""


class TwoNodes:
    """A job whose two nodes have two ranks each; node 0 shows the output of all."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._meet = f"127.0.0.1:{free_port()}"
        self._env = {
            "HVDLITE_TOKEN": secrets.token_hex(32),
            "TEST_FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self._stack = stack
        self._folder = folder
        self.nodes: list[MarkedJob] = []

    def start(self, code: str, *flags: str) -> None:
        self._command = (*flags, *python(code))
        for node in (0, 1):
            self.nodes.append(self._start(node, 2))

    def start_again(self, node: int, ranks: int = 2) -> None:
        """Start a node once more."""
        self.nodes[node] = self._start(node, ranks)

    def refused(self, ranks: int) -> str:
        """Start node 1 once more, which is refused; return what it says."""
        self.start_again(1, ranks)
        status, _, stderr, _ = self.nodes[1].finish()
        assert status == 1
        return stderr

    def _start(self, node: int, ranks: int) -> MarkedJob:
        where = ("--nodes", "2", "--meet", self._meet, "--node-rank", str(node))
        job = MarkedJob(ranks, *where, *self._command, env=self._env)
        return self._stack.enter_context(job)

    def ready(self, count: int) -> dict[int, list[str]]:
        """Read what so many processes say of themselves, by their number."""
        said: dict[int, list[str]] = {}
        while len(said) < count:
            line = self.read_until("ready")
            words = line.partition("] ")[2].split()
            said[int(words[1])] = words[2:]
        return said

    def read_until(self, words: str) -> str:
        """Read node 0's stdout up to the line that has these words, and return the line."""
        stdout = self.nodes[0].process.stdout
        assert stdout is not None
        while line := stdout.readline().decode():
            if words in line:
                return line
        raise AssertionError(f"{words!r} never came")

    def end(self) -> tuple[str, str]:
        """Let the job end well; return what node 0 has shown."""
        (self._folder / "end").touch()
        status, stdout, stderr, _ = self.nodes[0].finish()
        assert status == 0, stderr
        return stdout, stderr


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoNodes]:
    with ExitStack() as stack:
        yield TwoNodes(stack, tmp_path)


def test_worker_of_another_node_gets_a_successor_there(two: TwoNodes) -> None:
    two.start(ELASTIC, "--min-np", "2")
    said = two.ready(4)
    os.kill(int(said[3][0]), signal.SIGKILL)
    two.read_until("world of 3")
    assert list(two.ready(1)) == [4]
    two.read_until("world of 4")
    stdout, stderr = two.end()
    status, nothing, other, _ = two.nodes[1].finish()
    assert (status, nothing) == (0, ""), other
    assert "node 1 of 2 runs ranks 2, 3; node 0 shows their output" in other
    assert stdout.count("done with 4") == 4
    assert "[node 1]" in stderr


def test_node_that_comes_back_has_workers_again_but_no_second_one_and_no_other_one(
    two: TwoNodes,
) -> None:
    two.start(ELASTIC, "--min-np", "2", "--blacklist-cooldown-range", "1", "2")
    two.ready(4)
    first = two.nodes[1]
    assert "two nodes say that they are node 1" in two.refused(ranks=2)
    first.process.kill()
    two.read_until("world of 2")
    assert "[node 1] has come back with -np 1; it had -np 2" in two.refused(ranks=1)
    two.start_again(1)
    assert sorted(two.ready(2)) == [4, 5]
    two.read_until("world of 4")
    stdout, _ = two.end()
    assert stdout.count("done with 4") == 4
    status, _, stderr, _ = two.nodes[1].finish()
    assert status == 0, stderr


def test_servers_get_workers_of_a_node_that_comes_back(two: TwoNodes) -> None:
    two.start(SERVERS, "--servers", "1")
    two.ready(4)
    two.nodes[1].process.kill()
    wait_until(lambda: len(two.nodes[1].alive()) == 0, "the end of the processes of node 1")
    two.start_again(1)
    assert sorted(two.ready(2)) == [4, 5]
    two.end()
    assert two.nodes[1].finish()[0] == 0


def test_node_that_is_taken_away_leaves_the_job(two: TwoNodes) -> None:
    two.start(ELASTIC, "--min-np", "2")
    two.ready(4)
    two.nodes[1].signal(signal.SIGTERM)
    assert two.nodes[1].finish()[0] == 0
    assert two.nodes[0].process.poll() is None
    stdout, stderr = two.end()
    assert stdout.count("done with 2") == 2
    assert "[node 1] is taken away (SIGTERM to its agent)" in stderr
