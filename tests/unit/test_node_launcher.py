"""Node 0 meets the other nodes: it names the one that says something wrong, and goes on."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator

import pytest

from hvdlite.launch.channels import LaunchError
from hvdlite.launch.node import NodeLauncher, introduction
from hvdlite.launch.sealed import SealedChannel, dial
from hvdlite.rendezvous.address import listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from patience import HANG, wait_until

JOB = Job(secrets.token_bytes(32), b"unit test of nod", 0)
RIGHT = introduction(nodes=2, ranks=1)


@contextlib.contextmanager
def node_0() -> Iterator[tuple[NodeLauncher, str]]:
    """Listen for one other node; give the address, too."""
    listener = listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    remote_launcher = NodeLauncher(listener, JOB, 2, HANG, address)
    try:
        yield remote_launcher, address
    finally:
        remote_launcher.conclude(0, "")


def connect(address: str, said: bytes) -> SealedChannel:
    return dial("node 0", address, JOB, 1, Deadline(HANG), said)


def end(*channels: SealedChannel) -> None:
    for channel in channels:
        channel.end()


@pytest.mark.parametrize(
    "said", [b"{", b"\xff", b"[" * 20_000, b"7", json.dumps(["host", 0, 2]).encode()]
)
def test_wrong_introduction_is_named_while_nodes_gather(said: bytes) -> None:
    with node_0() as (remote_launcher, address):
        channel = connect(address, said)
        with pytest.raises(LaunchError, match=r"node 1 \(127\.0\.0\.1\) says what no node"):
            remote_launcher.gather(Deadline(HANG))
        end(channel)


def test_wrong_introduction_does_not_keep_a_lost_node_from_coming_back() -> None:
    with node_0() as (remote_launcher, address):
        first = connect(address, RIGHT)
        (node,) = remote_launcher.gather(Deadline(HANG))
        end(first, remote_launcher.open(node.name))
        wrong = connect(address, b"{")
        again = connect(address, RIGHT)
        wait_until(lambda: remote_launcher.reachable(node.name), "the node is there again")
        end(wrong, again, remote_launcher.open(node.name))
