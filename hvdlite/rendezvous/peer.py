"""One client's connection to a service; it never blocks."""

from __future__ import annotations

import socket
import time

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.frames import FrameReader, FrameWriter
from hvdlite.rendezvous.handshake import Job, ServerHandshake, session_keys

_MAX_BACKLOG_BYTES = 4 << 20
_READ_BYTES = 1 << 16


class BacklogError(Exception):
    """The client does not read what is sent to it."""


class Peer:
    """An authenticated connection, with the frames of both directions. Used by one thread."""

    def __init__(self, connection: socket.socket, job: Job, handshake: ServerHandshake) -> None:
        from_client, from_server = session_keys(job, handshake.transcript)
        connection.setblocking(False)
        self.connection = connection  # owned
        self.number = handshake.rank  # the rank, or the number of the worker, at the other end
        self.outgoing = bytearray()  # bytes that the kernel has not taken yet
        self.heard_at = time.monotonic()  # when the last bytes came; monotonic
        self.complaint = ""  # why the connection is useless although it has not ended; "" otherwise
        self.closed = False  # whether `close` was called
        self._reader, self._writer = FrameReader(from_client), FrameWriter(from_server)

    def send(self, body: bytes) -> None:
        """Send a message, or queue what the kernel does not take now; `flush` goes on."""
        # Raises BacklogError if more than 4 MiB wait for the client to read them.
        self.outgoing += self._writer.wrap(body)
        self.flush()
        if len(self.outgoing) > _MAX_BACKLOG_BYTES:
            raise BacklogError(f"left {len(self.outgoing)} bytes of messages unread")

    def flush(self) -> None:
        """Write as much as the kernel takes now; `read` notices if the connection has ended."""
        while self.outgoing:
            try:
                del self.outgoing[: self.connection.send(self.outgoing)]
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                self.outgoing.clear()

    def read(self) -> list[bytes] | None:
        """Return the messages that came; None if the connection has ended or is useless."""
        try:
            data = self.connection.recv(_READ_BYTES)
            bodies = self._reader.feed(data) if data else None
        except BlockingIOError:
            return []
        except OSError:
            return None
        except BootstrapError as error:
            self.complaint = str(error)
            return None
        self.heard_at = time.monotonic()
        return bodies

    def close(self, seconds: float = 0.0) -> None:
        """Close the connection; first give the client this time to take what is on its way."""
        self.closed = True
        if seconds > 0:
            self.connection.settimeout(seconds)
            self.flush()
        self.connection.close()
