"""The way of node mode: the agents connect to node 0 by themselves, and node 0 waits for them.

`gather` listens until all nodes have connected. Each proves by the usual handshake that it knows
the secret of the job, names its node as the rank, and introduces itself: its host, how many ranks
it runs, and how many nodes it was told. `NodeLines` is then the way to these agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdlite.launch.remote.messages import Kind, data_frame
from hvdlite.launch.remote.sealed import SealedLine
from hvdlite.launch.remote.ways import LaunchError
from hvdlite.rendezvous.acceptor import Acceptor
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job, Role, ServerHandshake, session_keys

LAUNCHER_SILENCE = 30.0  # seconds until a node gives node 0 up, as agents do over ssh
_NODE_SILENCE = 10.0  # seconds until node 0 gives another node up
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Node:
    """A node that has connected to node 0."""

    number: int  # its number, from 1
    hostname: str  # the name of its host
    ranks: int  # how many ranks it runs
    line: SealedLine  # the line to its agent

    @property
    def name(self) -> str:
        """The name of the node in messages, which no other node has."""
        return f"{self.hostname} [node {self.number}]"


def introduction(nodes: int, ranks: int) -> bytes:
    """Return what a node says first."""
    return json.dumps([socket.gethostname(), ranks, nodes]).encode()


class NodeLines:
    """The way to nodes that have connected; see `ways.Way`."""

    carries_secrets: ClassVar[bool] = False
    reaches_again: ClassVar[bool] = False

    def __init__(self, nodes: Sequence[Node], connect_seconds: float) -> None:
        self.connect_seconds = connect_seconds
        self._nodes = {node.name: node for node in nodes}

    def open(self, host: str) -> SealedLine:
        """Return the line to a node."""
        return self._nodes[host].line

    def explain(self, host: str, said: str, status: int | None) -> str:
        """Describe why a node is not there any more."""
        return f"lost {host} before its ranks ran: {said or 'it has hung up'}"

    def address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the address from which the node has connected."""
        return self._nodes[host].line.peer


class _Gathering:
    """Node 0 while it waits for the others. Used by one thread."""

    def __init__(self, listener: socket.socket, job: Job, nodes: int) -> None:
        self._job = job
        self._count = nodes
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, job, nodes, self._selector, self._welcome)
        self._lines: list[tuple[int, SealedLine]] = []
        self.nodes: dict[int, Node] = {}

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != Role.NODE or handshake.rank == 0:
            connection.close()
            return
        keys = session_keys(self._job, handshake.transcript)
        self._lines.append((handshake.rank, SealedLine(connection, keys, _NODE_SILENCE)))

    def wait(self, deadline: Deadline, address: str) -> None:
        """Wait until all nodes are there; raise as `gather` does."""
        while len(self.nodes) < self._count - 1:
            if deadline.passed:
                raise LaunchError(self._missing(address))
            for key, _ in self._selector.select(_LOOK_SECONDS):
                key.data()
            self._acceptor.expire()
            for node in self.nodes.values():
                if node.line.ended:
                    raise LaunchError(f"lost {node.name} before the job began: {node.line.said()}")
            for number, line in list(self._lines):
                if line.ended or line.introduction is not None:
                    self._lines.remove((number, line))
                if line.introduction is not None:
                    self._add(number, line, line.introduction)

    def _add(self, number: int, line: SealedLine, said: bytes) -> None:
        hostname, ranks, nodes = json.loads(said)
        new = Node(number, str(hostname), int(ranks), line)
        there = self.nodes.get(number)
        if there is not None:
            line.cut()
            raise LaunchError(
                f"two nodes say that they are node {number}: {there.hostname} ({there.line.peer}) "
                f"and {hostname} ({line.peer}); give each one its own --node-rank"
            )
        self.nodes[number] = new
        if nodes != self._count:
            raise LaunchError(
                f"{new.name} was started with --nodes {nodes}, and node 0 with --nodes "
                f"{self._count}; give all nodes the same number"
            )

    def _missing(self, address: str) -> str:
        missing = [str(one) for one in range(1, self._count) if one not in self.nodes]
        return (
            f"node {', '.join(missing)} of {self._count} has not connected to node 0 at {address} "
            "in time; does hvdlite-run start there, with the same --meet, HVDLITE_TOKEN and "
            "HVDLITE_EPOCH? --start-timeout gives it more time"
        )

    def close(self) -> None:
        self._acceptor.close()
        self._selector.close()

    def give_up(self, status: int, why: str) -> None:
        """Tell the nodes that are there why the job does not begin, and hang up."""
        lines = [line for _, line in self._lines] + [node.line for node in self.nodes.values()]
        for line in lines:
            with contextlib.suppress(OSError):
                os.write(line.write_fd, data_frame(Kind.OUTCOME, 0, [status, why]))
            line.hang_up()
        for line in lines:
            line.end()


def gather(
    listener: socket.socket, job: Job, nodes: int, deadline: Deadline, address: str
) -> list[Node]:
    """Wait until all other nodes have connected."""
    # `listener` says where they connect; this closes it.
    # `nodes` says how many nodes there are, with node 0.
    # Returns the nodes by their numbers, from node 1; the caller owns their lines.
    # Raises LaunchError if a node is missing at the deadline, has gone, or contradicts another one.
    gathering = _Gathering(listener, job, nodes)
    try:
        gathering.wait(deadline, address)
    except BaseException as error:
        interrupted = not isinstance(error, LaunchError)
        gathering.give_up(130 if interrupted else 1, "" if interrupted else str(error))
        raise
    finally:
        gathering.close()
    return [gathering.nodes[number] for number in range(1, nodes)]
