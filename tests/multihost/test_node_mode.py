"""Node mode on three hosts: hvdlite-run is started once on each, and they meet at node 0."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launch.marked import DEAF_SLEEPER, SLEEPER
from launch.test_real_job import LOOP
from multihost.bed import Bed, end, finish, python
from patience import HANG, wait_until

FOREVER = LOOP + "while True: step()"
PORT = 23456
SHOW = (
    "import os, socket; from hvdlite import basics; basics.init();"
    "print(*(getattr(basics, name)() for name in ('rank', 'size', 'local_rank', 'local_size',"
    " 'cross_rank', 'cross_size')), socket.gethostname(), os.environ['HOROVOD_HOSTNAME'],"
    " os.environ['MINE'], os.getcwd())"
)

SNIFF = """
import select, socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
packets.bind(("eth0", 0))
print("ready", flush=True)
seen = bytearray()
while sys.stdin not in select.select([sys.stdin, packets], [], [])[0]:
    seen += packets.recv(1 << 16)
token, own = sys.argv[1:]
for name, what in (
    ("HVDLITE_LOCAL_RANK", b"HVDLITE_LOCAL_RANK"),
    ("token", token.encode()),
    ("its bytes", bytes.fromhex(token)),
    ("environment", own.encode()),
):
    print(name, what in seen)
"""


class Nodes:
    """One hvdlite-run on each host; started one by one."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self.token = secrets.token_hex(32)
        self._meet = f"node1:{PORT}"
        self.started: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        node: int,
        *command: str,
        ranks: int = 1,
        nodes: int = 3,
        host: int | None = None,
        meet: str | None = None,
        flags: Sequence[str] = (),
        **env: str,
    ) -> subprocess.Popen[bytes]:
        where = ("--nodes", str(nodes), "--node-rank", str(node), "--meet", meet or self._meet)
        self.started[node] = self._bed.start_launcher(
            *(*where, "-np", str(ranks), *flags, *command),
            host=node if host is None else host,
            env={"HVDLITE_TOKEN": self.token, "MINE": f"of {node}", **env},
        )
        return self.started[node]

    def start_all(self, *command: str, **options: object) -> None:
        """Start three nodes with two, one and two ranks, the launcher last."""
        for node, ranks in ((2, 2), (1, 1), (0, 2)):
            self.start(node, *command, ranks=ranks, **options)

    def launchers(self, node: int) -> list[int]:
        """List the processes of hvdlite-run itself on a node, by this machine's numbers."""
        found = self._bed.processes(node, f"--node-rank\0{node}\0")
        return [pid for pid in found if b"nsenter" not in command_of(pid)]

    def signal(self, node: int, number: int) -> None:
        """Send a signal to hvdlite-run on a node."""
        (pid,) = self.launchers(node)
        os.kill(pid, number)

    def wait_until_ready(self, ready: int) -> None:
        """Read node 0's stdout until `ready` lines with the word "ready" have come."""
        stdout = self.started[0].stdout
        assert stdout is not None
        while ready:
            line = stdout.readline()
            if not line:
                stderr = self.started[0].stderr
                assert stderr is not None
                raise AssertionError(stderr.read().decode())
            ready -= b"ready" in line

    def finish(self) -> tuple[list[int], list[str], list[str]]:
        """Wait for all; return, by node, their exit statuses, stdouts and stderrs."""
        ended = {node: finish(one) for node, one in self.started.items()}
        columns = [list(column) for column in zip(*(ended[n] for n in sorted(ended)), strict=True)]
        return columns[0], columns[1], columns[2]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b"nsenter"  # It has ended.


@pytest.fixture
def nodes(bed: Bed) -> Iterator[Nodes]:
    made = Nodes(bed)
    yield made
    for one in made.started.values():
        end(one)


def test_uneven_nodes_make_one_world(nodes: Nodes) -> None:
    nodes.start_all(*python(SHOW))
    statuses, stdouts, stderrs = nodes.finish()
    assert statuses == [0, 0, 0], stderrs
    assert sorted(stdouts[0].splitlines()) == [
        "[0] 0 5 0 2 0 3 node1 node1 of 0 /tmp",
        "[1] 1 5 1 2 0 2 node1 node1 of 0 /tmp",
        "[2] 2 5 0 1 1 3 node2 node2 of 1 /tmp",
        "[3] 3 5 0 2 2 3 node3 node3 of 2 /tmp",
        "[4] 4 5 1 2 1 2 node3 node3 of 2 /tmp",
    ]
    assert stdouts[1:] == ["", ""]
    assert stderrs == [
        "",
        "hvdlite-run: node 1 of 3 runs ranks 2; node 0 shows their output\n",
        "hvdlite-run: node 2 of 3 runs ranks 3, 4; node 0 shows their output\n",
    ]


@pytest.mark.long
def test_secret_and_environment_do_not_travel(nodes: Nodes, bed: Bed) -> None:
    """They are not in what the first host sends and receives, and on no command line."""
    sniffer = subprocess.Popen(
        bed.inside(0, sys.executable, "-c", SNIFF, nodes.token, "an environment of"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sniffer.stdout is not None
    assert sniffer.stdout.readline() == "ready\n"
    for node in (1, 2, 0):
        nodes.start(node, *python(FOREVER), MINE=f"an environment of {node}")
    nodes.wait_until_ready(3)
    for host in range(3):
        for pid in bed.processes(host, f"HVDLITE_TOKEN={nodes.token}"):
            assert nodes.token.encode() not in command_of(pid)
    nodes.signal(0, signal.SIGTERM)
    assert nodes.finish()[0] == [143, 143, 143]
    seen, _ = sniffer.communicate("", timeout=HANG)
    assert seen == "HVDLITE_LOCAL_RANK True\ntoken False\nits bytes False\nenvironment False\n"


@pytest.fixture
def impatient(bed: Bed) -> tuple[str, str]:
    """Flags by which a start is given up soon, but not before the other nodes can be there."""
    begun = time.monotonic()
    bed.run(0, sys.executable, "-m", "hvdlite.launch", "--version")
    return "--start-timeout", f"{4 + 8 * (time.monotonic() - begun):.1f}"


@pytest.mark.long
def test_wrong_token(nodes: Nodes, impatient: tuple[str, str]) -> None:
    nodes.start(0, *python(SHOW), flags=impatient)
    nodes.start(1, *python(SHOW), flags=impatient)
    nodes.start(2, *python(SHOW), HVDLITE_TOKEN="ab" * 32, flags=impatient)
    statuses, _, stderrs = nodes.finish()
    assert statuses == [1, 1, 1]
    missing = "node 2 of 3 has not connected to node 0 at node1:23456 in time; "
    assert missing in stderrs[0] and missing in stderrs[1]
    assert "refused a connection: a stranger named another job" in stderrs[0]
    assert "the peer closed the connection of node 2 during the handshake" in stderrs[2]
    assert "is HVDLITE_TOKEN the same there?" in stderrs[2]
    assert not any("Traceback" in stderr for stderr in stderrs)


@pytest.mark.long
def test_name_that_no_other_host_can_reach(nodes: Nodes, bed: Bed) -> None:
    name = f"train-{secrets.token_hex(3)}"
    bed.name_host(name, "127.0.1.1")
    nodes.start(0, *python(SHOW), meet=f"{name}:{PORT}")
    statuses, _, stderrs = nodes.finish()
    assert statuses == [1]
    assert f"node 0 would wait at {name}:{PORT}, which is 127.0.1.1 here" in stderrs[0]


@pytest.mark.long
def test_nodes_that_count_differently(nodes: Nodes) -> None:
    nodes.start(0, *python(SHOW), nodes=2)
    nodes.start(1, *python(SHOW), nodes=3)
    statuses, _, stderrs = nodes.finish()
    assert statuses == [1, 1]
    said = "node2 [node 1] was started with --nodes 3, and node 0 with --nodes 2; "
    assert said in stderrs[0] and said in stderrs[1]


def test_rank_that_fails_fails_all_nodes_alike(nodes: Nodes) -> None:
    nodes.start_all(*python(LOOP + "if basics.rank() == 3: sys.exit(7)\nwhile True: step()"))
    statuses, _, stderrs = nodes.finish()
    assert statuses == [7, 7, 7]
    assert "rank 3 (host node3 [node 2], pid " in stderrs[0]
    for node in (1, 2):
        assert stderrs[node].endswith(
            f"node {node} of 3: the job ended with status 7: node 0 shows the reason\n"
        )


def test_node_that_is_killed(nodes: Nodes) -> None:
    nodes.start_all(*python(FOREVER))
    nodes.wait_until_ready(5)
    nodes.signal(2, signal.SIGKILL)
    statuses, _, stderrs = nodes.finish()
    assert statuses[0] == statuses[1] != 0
    assert "(host node3 [node 2], pid " in stderrs[0]
    assert "failed first: lost the connection to its host: it has hung up" in stderrs[0]


@pytest.mark.long
def test_node_that_is_stopped(nodes: Nodes) -> None:
    nodes.start_all(*python(DEAF_SLEEPER))
    nodes.wait_until_ready(5)
    (stopped,) = nodes.launchers(2)
    os.kill(stopped, signal.SIGSTOP)
    try:
        statuses = [finish(nodes.started.pop(node))[::2] for node in (0, 1)]
    finally:
        os.kill(stopped, signal.SIGCONT)
        nodes.started[2].send_signal(signal.SIGCONT)  # nsenter stops with its child.
    (first, stderr), (second, _) = statuses
    assert first == second == 255
    assert "(host node3 [node 2], pid " in stderr
    assert "it has said nothing for 10 s: it is stopped, or cut off" in stderr
    status, _, stderr, _ = finish(nodes.started[2])
    assert status == 1
    assert "node 2 of 3 has lost node 0 at node1:23456: " in stderr


def test_signal_on_another_node_ends_the_job_everywhere(nodes: Nodes) -> None:
    nodes.start_all(*python(FOREVER))
    nodes.wait_until_ready(5)
    nodes.signal(1, signal.SIGINT)
    statuses, _, stderrs = nodes.finish()
    assert statuses == [130] * 3, stderrs
    assert "hvdlite-run: Ctrl-C on host node2 [node 1]: stopping 5 ranks" in stderrs[0]


def test_signal_on_all_nodes_at_once_leaves_the_ranks_their_grace(nodes: Nodes) -> None:
    """As a batch system sends it."""
    code = (
        "import signal, time\n"
        "def save(*_):\n"
        "    time.sleep(1)\n    print('saved', flush=True)\n    raise SystemExit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    nodes.start_all(*python(code))
    nodes.wait_until_ready(5)
    # To look for them takes a while, and a job that has ended has none.
    launchers = [nodes.launchers(node) for node in (2, 1, 0)]
    for (pid,) in launchers:
        os.kill(pid, signal.SIGTERM)
    statuses, stdouts, stderrs = nodes.finish()
    assert statuses == [75, 75, 75], stderrs
    assert stdouts[0].count("saved") == 5


def test_signal_on_a_node_whose_ranks_have_ended(nodes: Nodes) -> None:
    nodes.start(0, *python(SLEEPER), nodes=2)
    nodes.start(1, *python("print('ready')"), nodes=2)
    nodes.wait_until_ready(2)
    (pid,) = nodes.launchers(1)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: not children.read_text(), "the end of all that node 1 has started")
    nodes.signal(1, signal.SIGINT)
    statuses, _, stderrs = nodes.finish()
    assert statuses == [130, 130], stderrs
    assert "Ctrl-C on host node2 [node 1]: stopping 1 rank (" in stderrs[0]
