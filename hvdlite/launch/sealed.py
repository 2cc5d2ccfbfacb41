"""A channel over TCP between two nodes: each block has a MAC, and a silent node is noticed.

After the handshake two threads move bytes between the connection and a socket pair, whose other end
its owner reads and writes as if it were the connection: one thread for each direction. The one that
sends also sends a *beat*, an empty block, every few seconds in which there is nothing else. If
nothing has come for the longest silence, the other node is stopped, or cut off, and the channel
ends. Nothing is encrypted.

Agents connect to the launcher by themselves (`dial`) in node mode and on Ray: each proves by the
usual handshake that it knows the secret of the job, and names its number as the rank.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
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
_LONGEST_FAREWELL = 5.0  # seconds in which the other end does not hang up after this one
_LONGEST_END = 10.0  # seconds that the rest may take to be sent
_BLOCK = 1 << 16
_HUNG_UP = "it has hung up"


class SealedChannel:
    """One end of the channel; see `channels.Channel`."""

    def __init__(
        self,
        connection: socket.socket,
        keys: tuple[bytes, bytes],
        silence: float,
        introduction: bytes = b"",
        pair: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        """Take over a connection whose handshake is completed.

        Args:
            connection: the connection; owned by the channel.
            keys: those of blocks from the other node, and from this one.
            silence: seconds without a block after which the other node counts as lost.
            introduction: what this node says first.
            pair: the sockets between this and the owner, whose end is the second.
        """
        self.peer = str(connection.getpeername()[0])  # the IP address of the other node
        self.introduction: bytes | None = None  # the first block from the other node
        self.ended = False  # whether the connection has ended
        self._silence = silence
        self._why = ""
        self._outer = connection
        self._outer.settimeout(None)
        self._outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inner, self._owners = pair or socket.socketpair()
        # One socket for both directions.
        self.read_fd = self.write_fd = self._owners.fileno()
        self._reader, self._writer = FrameReader(keys[0]), FrameWriter(keys[1])
        self._receiver, self._sender = (
            threading.Thread(target=work, args=arguments, name="hvdlite-channel", daemon=True)
            for work, arguments in ((self._receive, ()), (self._send, (introduction,)))
        )
        self._receiver.start()
        self._sender.start()

    def said(self) -> str:
        return self._why

    def cut(self) -> None:
        """End the channel at once for its owner; what the owner has written is still sent."""
        _shut(self._owners, socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait until what the owner has written is sent, for some seconds; close its end."""
        self.cut()
        # Closed earlier, with bytes that the owner has not read, it would reset the socket pair.
        self._sender.join(_LONGEST_END)
        self._owners.close()
        _shut(self._outer, socket.SHUT_RDWR)

    def _receive(self) -> None:
        try:
            self._why = self._receive_all()
        except ConnectionError:  # It was killed with bytes under way to it.
            self._why = _HUNG_UP
        except (OSError, BootstrapError) as error:
            self._why = str(error)
        self.ended = True
        # The other thread and the owner find the end; the owner gets what has arrived before.
        _shut(self._outer, socket.SHUT_RDWR)
        _shut(self._inner, socket.SHUT_RDWR)

    def _receive_all(self) -> str:
        """Pass on what the other node sends; return why that has ended."""
        while _readable(self._outer, self._silence):
            data = self._outer.recv(_BLOCK)
            if not data:
                return _HUNG_UP
            for block in self._reader.feed(data):
                if self.introduction is None:
                    self.introduction = block
                else:
                    with contextlib.suppress(BrokenPipeError):  # The owner does not read any more.
                        self._inner.sendall(block)
        return f"it has said nothing for {self._silence:g} s: it is stopped, or cut off"

    def _send(self, block: bytes) -> None:
        """Send the introduction, and then what the owner writes, until it hangs up."""
        try:
            while True:
                self._outer.sendall(self._writer.wrap(block))
                block = b""
                if _readable(self._inner, _BEAT_SECONDS):
                    block = self._inner.recv(_BLOCK)
                    if not block:
                        break
            # The kernel would drop what is under way if this end closed first.
            self._outer.shutdown(socket.SHUT_WR)
            self._receiver.join(_LONGEST_FAREWELL)
        except OSError:
            pass  # The other thread finds out why.
        _shut(self._outer, socket.SHUT_RDWR)
        self._receiver.join()
        self._outer.close()
        self._inner.close()


def _readable(end: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # `select.select` refuses high descriptors.
    poll.register(end, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _shut(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)


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
        if handshake.role != self.role:
            connection.close()
            return
        try:
            self._dialled(handshake.rank, connection, session_keys(self._job, handshake.transcript))
        except OSError:  # The other node has hung up already.
            connection.close()

    def _dialled(self, number: int, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        raise NotImplementedError
