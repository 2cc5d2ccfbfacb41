"""A channel over TCP between two nodes: each block has a MAC, and a silent node is noticed.

After the handshake a thread relays bytes between the connection and a socket pair, whose other end
its owner reads and writes as if it were the connection. The thread also sends a *beat*, an empty
block, every few seconds. If nothing has come for the longest silence, the other node is stopped, or
cut off, and the channel ends. Nothing is encrypted.

Agents connect to the launcher by themselves (`dial`) in node mode and on Ray: each proves by the
usual handshake that it knows the secret of the job, and names its number as the rank.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import ClassVar

from hvdlite.errors import BootstrapError
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

NODE_SILENCE = 10.0  # seconds until the launcher gives an agent that has dialled up
_LAUNCHER_SILENCE = 30.0  # seconds until the agent gives the launcher up, as agents do over ssh
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
        """Take over a connection whose handshake is completed.

        Args:
            connection: the connection; owned by the channel.
            keys: those of blocks from the other node, and from this one.
            silence: seconds without a block after which the other node counts as lost.
            introduction: what this node says first; None if the other one says something first.
            pair: the sockets between this and the owner, whose end is the second.
        """
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

    hang_up = cut  # `end` closes the descriptor.

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
            self._inner.setblocking(True)
            with contextlib.suppress(OSError):  # The owner gets what has arrived before the end.
                self._inner.sendall(self._to_inner)
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
            data = self._inner.recv(_BLOCK)
            if data:
                self._to_outer += self._writer.wrap(data)
            else:
                self._owner_left_at = now
        if outer & selectors.EVENT_WRITE:
            del self._to_outer[: self._outer.send(self._to_outer)]
            if self._owner_left_at:
                self._owner_left_at = now
        if inner & selectors.EVENT_WRITE:
            try:
                del self._to_inner[: self._inner.send(self._to_inner)]
            except BrokenPipeError:
                self._to_inner.clear()  # The owner does not read any more.
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
        raise NotImplementedError
