"""Other ways to start ranks on two hosts: hvdlite.run, and torchrun."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from multihost.bed import Bed, end, finish, python
from patience import HANG

TESTS = str(Path(__file__).parents[1])
PROGRAM = str(Path(TESTS) / "launch" / "other_launchers" / "report_placement.py")
BIN = Path(sys.executable).parent


RUN = """
import hvdlite, os, socket, sys
def where(data):
    import hvdlite.basics as hvd
    hvd.init()
    if data == b"boom" and hvd.rank() == 1: raise ValueError(f"boom on {socket.gethostname()}")
    hvd.engine().barrier("both").wait()
    return hvd.rank(), socket.gethostname(), len(data)
options = dict(hosts="node1:1,node2:2", ssh_config=sys.argv[1])
print(hvdlite.run(where, (bytes(5 << 20),), **options))
try: hvdlite.run(where, (b"boom",), **options)
except ValueError as error: print(error, "|", str(error.__cause__).splitlines()[1])
"""


def test_run_from_python(two_hosts: Bed) -> None:
    done = subprocess.run(
        two_hosts.inside(0, *python(RUN, two_hosts.ssh_config)),
        env={**base_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    size = 5 << 20
    results = [(0, "node1", size), (1, "node2", size), (2, "node2", size)]
    assert done.stdout == f"{results}\nboom on node2 | rank 1:\n", done.stderr


def placements(outputs: list[str]) -> dict[int, list[int]]:
    lines = [line.split() for text in outputs for line in text.splitlines() if "placement " in line]
    return {int(line[1]): [int(number) for number in line[2:]] for line in lines}


@pytest.mark.long
def test_torchrun_on_two_hosts(two_hosts: Bed) -> None:
    """torchrun tells the ranks the host of rank 0; the user sets the secret."""
    env = {**base_environment(), "PYTHONPATH": TESTS, "HVDLITE_TOKEN": secrets.token_hex(32)}
    agents = [
        subprocess.Popen(
            two_hosts.inside(
                host,
                *(str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", "2", "--node-rank"),
                *(str(host), "--master-addr", two_hosts.addresses[0], "--master-port", "29501"),
                PROGRAM,
            ),
            env={**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for host in range(2)
    ]
    try:
        ended = [finish(agent) for agent in agents]
    finally:
        for agent in agents:
            end(agent)
    assert [status for status, *_ in ended] == [0, 0], ended
    assert placements([stdout for _, stdout, *_ in ended]) == {
        0: [4, 6, 0, 2, 0, 2],
        1: [4, 6, 1, 2, 0, 2],
        2: [4, 6, 0, 2, 1, 2],
        3: [4, 6, 1, 2, 1, 2],
    }
