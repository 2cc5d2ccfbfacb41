"""Agents that connect to the launcher by themselves, as in node mode and on Ray.

Each proves by the usual handshake that it knows the secret of the job, and names its number as the
rank. `IncomingAgents` takes the connections. `NodeLauncher` is the remote launcher of node mode,
whose nodes the user starts: each introduces itself (its host, how many ranks it runs, and how many
nodes it was told). A node that was lost may connect again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdlite.launch.remote.channels import LaunchError
from hvdlite.launch.remote.messages import Kind, data_frame
from hvdlite.launch.remote.sealed import SealedChannel
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.dial import reach
from hvdlite.rendezvous.handshake import Job, Role, ServerHandshake, session_keys
from hvdlite.rendezvous.service import Service

NODE_SILENCE = 10.0  # seconds until the launcher gives such an agent up
_LAUNCHER_SILENCE = 30.0  # seconds until the agent gives the launcher up, as agents do over ssh
_SECOND_SECONDS = 15.0  # how long a second node of one number may wait for the end of the first
_LOOK_SECONDS = 0.02


def dial(
    server: str,
    address: str,
    job: Job,
    number: int,
    deadline: Deadline,
    introduction: bytes = b"",
    pair: tuple[socket.socket, socket.socket] | None = None,
) -> SealedChannel:
    """Connect an agent to the launcher; see `SealedChannel` for the introduction and the pair."""
    # `server` names the launcher in messages.
    # Raises BootstrapError if the launcher cannot be reached, or refuses.
    connection, handshake = reach(server, address, job, number, Role.NODE, deadline)
    from_client, from_server = session_keys(job, handshake.transcript)
    return SealedChannel(
        connection, (from_server, from_client), _LAUNCHER_SILENCE, introduction, pair
    )


def introduction(nodes: int, ranks: int) -> bytes:
    """Return what a node says first."""
    return json.dumps([socket.gethostname(), ranks, nodes]).encode()


class IncomingAgents(Service):
    """The launcher's side of such agents: a part of a `channels.RemoteLauncher`."""

    role = Role.NODE
    name = "hvdlite-nodes"
    carries_secrets: ClassVar[bool] = False

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role == self.role:
            keys = session_keys(self._job, handshake.transcript)
            self._dialled(handshake.rank, connection, keys)
        else:
            connection.close()

    def _dialled(self, number: int, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        """Take over the connection of an agent."""
        raise NotImplementedError


@dataclass
class Node:
    """A node that has connected to node 0."""

    number: int  # its number, from 1
    hostname: str  # the name of its host
    ranks: int  # how many ranks it runs
    channel: SealedChannel  # the last channel to its agent
    opened: bool = False  # whether that channel is in use, so that its user closes it

    @property
    def name(self) -> str:
        """The name of the node in messages, which no other node has."""
        return f"{self.hostname} [node {self.number}]"


@dataclass
class _Arrival:
    """A connection whose node has not been accepted."""

    number: int
    channel: SealedChannel
    at: float = field(default_factory=time.monotonic)


class NodeLauncher(IncomingAgents):
    """The remote launcher of node mode; `conclude` ends it."""

    def __init__(
        self, listener: socket.socket, job: Job, nodes: int, connect_seconds: float, meet: str
    ) -> None:
        """Listen for the other nodes; `nodes` counts node 0, too, which they know as `meet`."""
        super().__init__(job, nodes, listener)
        self.connect_seconds = connect_seconds
        self._count = nodes
        self._meet = meet
        self._gathered = False  # whether all nodes have been there
        self._wrong = ""  # how nodes contradict each other
        # Only the service's thread adds nodes and arrivals.
        self._nodes: dict[str, Node] = {}  # Their names are the keys.
        self._arrivals: list[_Arrival] = []
        self._start()

    def gather(self, deadline: Deadline) -> list[Node]:
        """Wait until all other nodes have connected; return them by their numbers."""
        # Raises LaunchError if a node is missing at the deadline, has gone, or contradicts another.
        while self._wrong or len(self._nodes) < self._count - 1:
            if self._wrong or deadline.passed:
                raise LaunchError(self._wrong or self._missing())
            time.sleep(_LOOK_SECONDS)
            for node in list(self._nodes.values()):
                if node.channel.ended:
                    raise LaunchError(
                        f"lost {node.name} before the job began: {node.channel.said()}"
                    )
        self._gathered = True
        return sorted(self._nodes.values(), key=lambda node: node.number)

    def conclude(self, status: int, why: str) -> None:
        """Take no more nodes, and tell those without ranks how the job has ended."""
        self.close()
        unused = [node.channel for node in self._nodes.values() if not node.opened]
        _tell([*unused, *(one.channel for one in self._arrivals)], status, why)

    # What the agents' side calls.

    def reachable(self, host: str) -> bool:
        """Return whether a node is connected, and its channel is not in use."""
        node = self._nodes[host]
        return not node.opened and not node.channel.ended

    def open(self, host: str) -> SealedChannel:
        """Return the channel to a node."""
        node = self._nodes[host]
        if node.opened:
            raise LaunchError(f"{host} has not connected again")
        node.opened = True
        return node.channel

    def explain(self, host: str, said: str, status: int | None) -> str:
        """Describe why a node is not there any more."""
        return f"lost {host} before its ranks ran: {said or 'it has hung up'}"

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the address from which the node has connected."""
        return self._nodes[host].channel.peer

    # The service's thread.

    def _dialled(self, number: int, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        if number == 0:
            connection.close()
        else:
            self._arrivals.append(_Arrival(number, SealedChannel(connection, keys, NODE_SILENCE)))

    def _sleep_seconds(self, now: float) -> float:
        return _LOOK_SECONDS if self._arrivals else super()._sleep_seconds(now)

    def _tick(self, asleep: float) -> None:
        for one in list(self._arrivals):
            said = one.channel.introduction
            if said is None and not one.channel.ended:
                continue
            there = next((n for n in self._nodes.values() if n.number == one.number), None)
            # A node that comes back may be faster than the news that its first channel has ended.
            first_lives = there is not None and not there.channel.ended
            if self._gathered and first_lives and asleep < one.at + _SECOND_SECONDS:
                continue
            self._arrivals.remove(one)
            if said is None:
                _tell([one.channel], 1, "")
            else:
                self._accept(one, there, said)

    def _accept(self, one: _Arrival, there: Node | None, said: bytes) -> None:
        try:
            hostname, ranks, nodes = _introduced(said)
        except (ValueError, RecursionError):
            self._refuse(
                one,
                f"node {one.number} ({one.channel.peer}) says what no node of this version of "
                "hvdlite says; install the same version on all nodes",
            )
            return
        new = Node(one.number, hostname, ranks, one.channel)
        if there is not None and not there.channel.ended:
            wrong = (
                f"two nodes say that they are node {one.number}: {there.hostname} "
                f"({there.channel.peer}) and {hostname} ({one.channel.peer}); give each one its "
                "own --node-rank"
            )
        elif nodes != self._count:
            wrong = (
                f"{new.name} was started with --nodes {nodes}, and node 0 with --nodes "
                f"{self._count}; give all nodes the same number"
            )
        elif there is not None and there.ranks != ranks:
            wrong = f"{there.name} has come back with -np {ranks}; it had -np {there.ranks}"
        else:
            if there is not None:
                if not there.opened:
                    _tell([there.channel], 1, "")
                there.channel, there.opened = one.channel, False
            else:
                self._nodes[new.name] = new
            return
        self._refuse(one, wrong)

    def _refuse(self, one: _Arrival, wrong: str) -> None:
        if not self._gathered:
            self._wrong = self._wrong or wrong
        _tell([one.channel], 1, wrong)

    def _missing(self) -> str:
        there = {node.number for node in self._nodes.values()}
        missing = [str(one) for one in range(1, self._count) if one not in there]
        return (
            f"node {', '.join(missing)} of {self._count} has not connected to node 0 at "
            f"{self._meet} in time; does hvdlite-run start there, with the same --meet, "
            "HVDLITE_TOKEN and HVDLITE_EPOCH? --start-timeout gives it more time"
        )


def _introduced(said: bytes) -> tuple[str, int, int]:
    """Read what a node says first: its host, its ranks, and how many nodes there are."""
    # Raises ValueError if it is something else.
    match json.loads(said):
        case [str(hostname), int(ranks), int(nodes)] if ranks > 0:
            return hostname, ranks, nodes
    raise ValueError("no introduction")


def _tell(channels: list[SealedChannel], status: int, why: str) -> None:
    """Tell nodes how the job has ended, and hang up."""
    for channel in channels:
        with contextlib.suppress(OSError):
            os.write(channel.write_fd, data_frame(Kind.OUTCOME, 0, [status, why]))
        channel.hang_up()
    for channel in channels:
        channel.end()
