"""The store, where the ranks of a job learn each other's addresses.

The launcher serves it, or rank 0 if the launcher is not hvdlite-run. Its main operation is
*exchange*: every rank sends a blob under the same key, and once all ranks have sent theirs, each
receives the blobs of all ranks, in rank order. For services, a rank can also *publish* a blob under
a key, and others *look it up*, as often and as late as they like; a look-up waits for the blob. A
blob is dropped when its rank disconnects, so blobs of an earlier start never mix with those of this
one, and who looks it up later is told that the rank has gone.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.acceptor import Acceptor
from hvdlite.rendezvous.address import address_of, fresh_unix_address, listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.dial import local_host, reach
from hvdlite.rendezvous.frames import FrameReader, FrameWriter
from hvdlite.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    Job,
    Role,
    ServerHandshake,
    session_keys,
)

_MAX_KEY_BYTES = 512
_KEY = struct.Struct("<BHd")  # operation, length of the key, seconds that the rank can wait
_BLOB = struct.Struct("<I")
_TICK_SECONDS = 0.25  # how often the store checks deadlines
_GRACE_SECONDS = 2.0  # how long a client waits after its deadline for the store's answer
_GIVEN, _FAILED, _GONE = b"g", b"f", b"e"
_EXCHANGE, _PUBLISH, _LOOK_UP = range(3)


class PublisherGoneError(BootstrapError):
    """The rank that published a blob has disconnected."""


@dataclass
class _Member:
    """One authenticated connection of one rank."""

    connection: socket.socket
    rank: int
    reader: FrameReader
    writer: FrameWriter


@dataclass
class _Exchange:
    deadline: float
    blobs: dict[int, bytes] = field(default_factory=dict)
    waiting: list[_Member] = field(default_factory=list)


@dataclass
class _Published:
    """A blob that one rank publishes, or that others wait for."""

    by: _Member | None = None
    blob: bytes = b""
    gone: bool = False  # whether the rank that published it last has disconnected
    waiting: list[tuple[float, _Member]] = field(default_factory=list)  # until when, who


class Store:
    """The server. It runs in one daemon thread, which `Store.start` starts."""

    def __init__(self, job: Job, size: int, listener: socket.socket) -> None:
        self.address = address_of(listener)
        self.met = False  # whether all ranks have once exchanged something
        self._job = job
        self._size = size
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, job, size, self._selector, self._welcome)
        self._members: list[_Member] = []
        self._exchanges: dict[bytes, _Exchange] = {}
        self._published: dict[bytes, _Published] = {}
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, lambda: None)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdlite-store", daemon=True)

    @classmethod
    def start(cls, size: int, job: Job, address: str | None = None) -> Store:
        """Listen, and serve until `close` is called."""
        # `size` says how many ranks the job has; an exchange is complete when all have sent a blob.
        # `job` is theirs; peers of another job, or of another epoch, are refused.
        # `address` says where to listen; by default a fresh abstract Unix socket.
        # Raises OSError if the kernel refuses to listen at this address.
        store = cls(job, size, listen(address or fresh_unix_address()))
        store._thread.start()
        return store

    def close(self) -> None:
        """Stop serving; clients that still wait get an error."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake_writer.send(b"x")
        self._thread.join()
        # The thread does not close these: it may end before the send() above has happened.
        self._wake_reader.close()
        self._wake_writer.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_TICK_SECONDS):
                handle: Callable[[], None] = key.data
                handle()
            self._acceptor.expire()
            self._expire()
        for member in list(self._members):
            self._drop(member)
        self._acceptor.close()
        self._selector.close()

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != Role.STORE:
            connection.close()
            return
        # With a timeout, a member that does not read its answers cannot block the others for long.
        connection.settimeout(HANDSHAKE_SECONDS)
        from_client, from_server = session_keys(self._job, handshake.transcript)
        member = _Member(
            connection, handshake.rank, FrameReader(from_client), FrameWriter(from_server)
        )
        self._members.append(member)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(member))

    def _read(self, member: _Member) -> None:
        try:
            data = member.connection.recv(1 << 16)
            bodies = member.reader.feed(data) if data else None
        except (OSError, BootstrapError):
            bodies = None
        if bodies is None:
            self._drop(member)
            return
        for body in bodies:
            self._give(member, body)

    def _give(self, member: _Member, body: bytes) -> None:
        empty = (_EXCHANGE, len(body), 0.0)
        operation, length, patience = _KEY.unpack_from(body) if len(body) >= _KEY.size else empty
        if length > _MAX_KEY_BYTES or length + _KEY.size > len(body) or operation > _LOOK_UP:
            self._drop(member)
            return
        key, blob = body[_KEY.size : _KEY.size + length], body[_KEY.size + length :]
        until = time.monotonic() + patience
        if operation == _PUBLISH:
            self._publish(member, key, blob)
        elif operation == _LOOK_UP:
            self._look_up(member, key, until)
        else:
            self._exchange(member, key, blob, until)

    def _publish(self, member: _Member, key: bytes, blob: bytes) -> None:
        published = self._published.setdefault(key, _Published())
        published.by, published.blob, published.gone = member, blob, False
        self._answer(member, _GIVEN)
        waiting, published.waiting = published.waiting, []
        for _, other in waiting:
            self._answer(other, _GIVEN + blob)

    def _look_up(self, member: _Member, key: bytes, until: float) -> None:
        published = self._published.setdefault(key, _Published())
        if published.gone:
            self._answer(member, _GONE + key)
        elif published.by is None:
            published.waiting.append((until, member))
        else:
            self._answer(member, _GIVEN + published.blob)

    def _exchange(self, member: _Member, key: bytes, blob: bytes, until: float) -> None:
        exchange = self._exchanges.setdefault(key, _Exchange(until))
        exchange.blobs[member.rank] = blob
        exchange.waiting.append(member)
        if len(exchange.blobs) == self._size:
            self.met = True
            del self._exchanges[key]
            parts = [exchange.blobs[rank] for rank in range(self._size)]
            answer = _GIVEN + b"".join(_BLOB.pack(len(part)) + part for part in parts)
            self._answer_all(exchange, answer)

    def _answer_all(self, exchange: _Exchange, answer: bytes) -> None:
        for member in exchange.waiting:
            self._answer(member, answer)

    def _answer(self, member: _Member, answer: bytes) -> None:
        try:
            member.connection.sendall(member.writer.wrap(answer))
        except OSError:
            self._drop(member)

    def _expire(self) -> None:
        now = time.monotonic()
        for key, exchange in list(self._exchanges.items()):
            if now < exchange.deadline:
                continue
            missing = [str(rank) for rank in range(self._size) if rank not in exchange.blobs]
            del self._exchanges[key]
            text = f"did not arrive in time ({key.decode(errors='replace')})"
            self._answer_all(exchange, _FAILED + f"rank {', '.join(missing)} {text}".encode())
        for key, published in self._published.items():
            late = [one for one in published.waiting if now >= one[0]]
            published.waiting = [one for one in published.waiting if now < one[0]]
            for _, member in late:
                text = f"no process has published {key.decode(errors='replace')} in time"
                self._answer(member, _FAILED + text.encode())

    def _drop(self, member: _Member) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._selector.unregister(member.connection)
        member.connection.close()
        for published in self._published.values():
            published.waiting = [one for one in published.waiting if one[1] is not member]
            if published.by is member:
                published.by, published.gone = None, True
        for key, exchange in list(self._exchanges.items()):
            if member not in exchange.waiting:
                continue
            # This rank sent its blob and has gone, so its address is dead: the exchange fails.
            exchange.waiting.remove(member)
            del self._exchanges[key]
            self._answer_all(
                exchange, _FAILED + f"rank {member.rank} left while connecting".encode()
            )


class StoreClient:
    """One rank's connection to the store."""

    def __init__(self, address: str, job: Job, rank: int, deadline: Deadline) -> None:
        """Connect to the store, and complete the handshake."""
        # Raises BootstrapError if the store cannot be reached, or refuses this rank.
        self._deadline = deadline
        self._rank = rank
        self._connection, handshake = reach("the store", address, job, rank, Role.STORE, deadline)
        from_client, from_server = session_keys(job, handshake.transcript)
        self._writer, self._reader = FrameWriter(from_client), FrameReader(from_server)

    @property
    def local_host(self) -> str | None:
        """The IP address from which this host reaches the store; None over a Unix socket."""
        return local_host(self._connection)

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        """Send a blob, and return those of all ranks, in rank order."""
        # Raises BootstrapError if some rank did not send its blob in time, or left; the message
        # names it.
        answer = self._ask(_EXCHANGE, key, blob)
        blobs, at = [], 1
        while at < len(answer):
            (length,) = _BLOB.unpack_from(answer, at)
            at += _BLOB.size
            blobs.append(answer[at : at + length])
            at += length
        return blobs

    def publish(self, key: str, blob: bytes) -> None:
        """Publish a blob for as long as this client is connected."""
        # Raises BootstrapError if the store has gone.
        self._ask(_PUBLISH, key, blob)

    def look_up(self, key: str) -> bytes:
        """Return the blob that a rank publishes under a key, and wait until one does."""
        # Raises PublisherGoneError if the rank that published it has disconnected.
        # Raises BootstrapError if no rank has published it in time.
        return self._ask(_LOOK_UP, key, b"")[1:]

    def _ask(self, operation: int, key: str, blob: bytes) -> bytes:
        name = key.encode()
        head = _KEY.pack(operation, len(name), max(0.0, self._deadline.seconds_left))
        try:
            self._deadline.send(self._connection, self._writer.wrap(head + name + blob))
            answer = self._receive()
        except TimeoutError:
            raise BootstrapError(
                f"rank {self._rank} got no answer from the store ({key}); is the launcher stopped?"
            ) from None
        except OSError as error:
            raise BootstrapError(f"rank {self._rank} lost the store: {error}") from error
        if answer[:1] == _GONE:
            raise PublisherGoneError(f"the rank that published {key} has gone")
        if answer[:1] != _GIVEN:
            raise BootstrapError(answer[1:].decode(errors="replace"))
        return answer

    def _receive(self) -> bytes:
        while True:
            # The store answers at the deadline, and names the missing ranks. So wait a bit longer.
            data = self._deadline.receive(self._connection, 1 << 16, _GRACE_SECONDS)
            if not data:
                raise BootstrapError(
                    f"rank {self._rank} lost the store while it waited for the other ranks"
                )
            bodies = self._reader.feed(data)
            if bodies:
                return bodies[0]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
