"""Node 0 meets the other nodes: it names the one that says something wrong, and goes on."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator

import pytest

from hvdlite.launch.remote.dial_in import NodeLines, dial, introduction
from hvdlite.launch.remote.sealed import SealedLine
from hvdlite.launch.remote.ways import LaunchError
from hvdlite.rendezvous.address import listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from patience import HANG, wait_until

JOB = Job(secrets.token_bytes(32), b"unit test of nod", 0)
RIGHT = introduction(nodes=2, ranks=1)


@contextlib.contextmanager
def node_0() -> Iterator[tuple[NodeLines, str]]:
    """Listen for one other node; give the address, too."""
    listener = listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    way = NodeLines(listener, JOB, 2, HANG, address)
    try:
        yield way, address
    finally:
        way.conclude(0, "")


def connect(address: str, said: bytes) -> SealedLine:
    return dial("node 0", address, JOB, 1, Deadline(HANG), said)


def end(*lines: SealedLine) -> None:
    for line in lines:
        line.hang_up()
        line.end()


@pytest.mark.parametrize(
    "said", [b"{", b"\xff", b"[" * 20_000, b"7", json.dumps(["host", 0, 2]).encode()]
)
def test_wrong_introduction_is_named_while_nodes_gather(said: bytes) -> None:
    with node_0() as (way, address):
        line = connect(address, said)
        with pytest.raises(LaunchError, match=r"node 1 \(127\.0\.0\.1\) says what no node"):
            way.gather(Deadline(HANG))
        end(line)


def test_wrong_introduction_does_not_keep_a_lost_node_from_coming_back() -> None:
    with node_0() as (way, address):
        first = connect(address, RIGHT)
        (node,) = way.gather(Deadline(HANG))
        end(first, way.open(node.name))
        wrong = connect(address, b"{")
        again = connect(address, RIGHT)
        wait_until(lambda: way.reachable(node.name), "the node is there again")
        end(wrong, again, way.open(node.name))
