"""A channel over TCP between two nodes: each block has a MAC, and a silent node is noticed.

After the handshake a thread relays bytes between the connection and a socket pair, whose other end
its owner reads and writes as if it were the connection. The thread also sends a *beat*, an empty
block, every few seconds. If nothing has come for the longest silence, the other node is stopped, or
cut off, and the channel ends. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdlite.errors import BootstrapError
from hvdlite.launch.channels import LaunchError
from hvdlite.launch.messages import Kind, data_frame
from hvdlite.rendezvous.client import reach
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import (
    FrameReader,
    FrameWriter,
    Job,
    Role,
    ServerHandshake,
    session_keys,
)
from hvdlite.rendezvous.service import Service

_BEAT_SECONDS = 2.5
_LONGEST_FAREWELL = 5.0  # seconds in which the other end reads none of the rest, nor hangs up
_LONGEST_END = 10.0
_BLOCK = 1 << 16
_HUNG_UP = "it has hung up"
_CAPACITY = 1 << 20  # bytes that wait for one side; while there are more, the other is not read


class SealedChannel:
    """One end of the channel; see `channels.Channel`."""

    pid: int | None = None  # None, since there is no process

    def __init__(
        self,
        connection: socket.socket,
        keys: tuple[bytes, bytes],
        silence: float,
        introduction: bytes | None = None,
        pair: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        """Take over a connection whose handshake is completed."""
        # `keys` has the keys of blocks from the other node, and from this one.
        # `silence` gives the seconds without a block after which the other node counts as lost.
        # `introduction` says what this node says first; None if the other one says something first.
        # `pair` has the sockets between this and the owner, whose end is the second; by default new
        # ones.
        self.peer = str(connection.getpeername()[0])  # the IP address of the other node
        # The first block from the other node, if the channel waits for one.
        self.introduction: bytes | None = None
        self.ended = False  # whether the connection has ended
        self._waits = introduction is None
        self._silence = silence
        self._why = ""
        self._outer = connection
        self._outer.setblocking(False)
        self._outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inner, self._owners = pair or socket.socketpair()
        self._inner.setblocking(False)
        # One blocking socket, for both directions.
        self.read_fd = self.write_fd = self._owners.fileno()
        self._reader, self._writer = FrameReader(keys[0]), FrameWriter(keys[1])
        self._to_outer = bytearray(self._writer.wrap(introduction or b""))
        self._to_inner = bytearray()
        self._owner_left_at = 0.0  # monotonic time; 0 while the owner has its end open
        self._heard_at = self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._relay, name="hvdlite-channel", daemon=True)
        self._thread.start()

    def said(self) -> str:
        return self._why

    def cut(self) -> None:
        """End the channel at once for its owner; what the owner has written is still sent."""
        with contextlib.suppress(OSError):
            self._owners.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """End the channel for its owner; `end` closes the descriptor."""
        self.cut()

    def end(self) -> None:
        """Wait until what the owner has written is sent, for some seconds; close its end."""
        # Closed earlier, with bytes that the owner has not read, it would reset the socket pair.
        self._thread.join(_LONGEST_END)
        self._owners.close()

    def _relay(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._outer, selectors.EVENT_READ)
                selector.register(self._inner, selectors.EVENT_READ)
                while self._turn(selector):
                    pass
        except ConnectionError:  # It was killed with bytes under way to it.
            self._why = self._why or _HUNG_UP
        except (OSError, BootstrapError) as error:
            self._why = self._why or str(error)
        finally:
            self._deliver()
            self.ended = True
            self._outer.close()
            self._inner.close()

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Move bytes that can be moved now; return whether the channel goes on."""
        reads = len(self._to_inner) < _CAPACITY
        takes = len(self._to_outer) < _CAPACITY and not self._owner_left_at
        _watch(selector, self._outer, reads, bool(self._to_outer))
        _watch(selector, self._inner, takes, bool(self._to_inner))
        ready = {key.fileobj: events for key, events in selector.select(_BEAT_SECONDS / 4)}
        now = time.monotonic()
        outer, inner = ready.get(self._outer, 0), ready.get(self._inner, 0)
        if outer & selectors.EVENT_READ:
            self._heard_at = now
            if not self._receive():
                return False
        if inner & selectors.EVENT_READ and takes:
            self._take()
        if outer & selectors.EVENT_WRITE:
            del self._to_outer[: self._outer.send(self._to_outer)]
            if self._owner_left_at:
                self._owner_left_at = now
        if inner & selectors.EVENT_WRITE:
            self._pass_on()
        return self._goes_on(now, reads)

    def _receive(self) -> bool:
        data = self._outer.recv(_BLOCK)
        for block in self._reader.feed(data):
            if self._waits:
                self._waits = False
                self.introduction = block
            else:
                self._to_inner += block
        if not data:
            self._why = self._why or _HUNG_UP
        return bool(data)

    def _take(self) -> None:
        data = self._inner.recv(_BLOCK)
        if data:
            self._to_outer += self._writer.wrap(data)
        else:
            self._owner_left_at = time.monotonic()

    def _pass_on(self) -> None:
        try:
            del self._to_inner[: self._inner.send(self._to_inner)]
        except BrokenPipeError:
            self._to_inner.clear()  # The owner does not read any more.

    def _goes_on(self, now: float, reads: bool) -> bool:
        """Send a beat if one is due; return whether the channel has to go on."""
        if not reads:
            self._heard_at = now  # The owner is slow, and the other node is not to blame.
        if now > self._heard_at + self._silence:
            self._why = f"it has said nothing for {self._silence:g} s: it is stopped, or cut off"
            return False
        if self._owner_left_at:
            if not self._to_outer:
                with contextlib.suppress(OSError):
                    self._outer.shutdown(socket.SHUT_WR)
            # The kernel would drop what is under way if this end closed first.
            return now < self._owner_left_at + _LONGEST_FAREWELL
        if now > self._beat_at and not self._to_outer:
            self._beat_at = now + _BEAT_SECONDS
            self._to_outer += self._writer.wrap(b"")
        return True

    def _deliver(self) -> None:
        """Give the owner what has arrived before the end."""
        self._inner.setblocking(True)
        with contextlib.suppress(OSError):
            self._inner.sendall(self._to_inner)


def _watch(selector: selectors.BaseSelector, end: socket.socket, reads: bool, writes: bool) -> None:
    """Watch one end for what is wanted of it; a selector cannot watch for nothing."""
    events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
    watched = selector.get_map().get(end)
    if watched is not None and watched.events == events:
        return
    if watched is not None:
        selector.unregister(end)
    if events:
        selector.register(end, events)


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
    connection, handshake = reach(server, address, job, number, Role.NODE, deadline)
    from_client, from_server = session_keys(job, handshake.transcript)
    return SealedChannel(
        connection, (from_server, from_client), _LAUNCHER_SILENCE, introduction, pair
    )


def introduction(nodes: int, ranks: int) -> bytes:
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
        node = self._nodes[host]
        return not node.opened and not node.channel.ended

    def open(self, host: str) -> SealedChannel:
        node = self._nodes[host]
        if node.opened:
            raise LaunchError(f"{host} has not connected again")
        node.opened = True
        return node.channel

    def explain(self, host: str, said: str, status: int | None) -> str:
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
