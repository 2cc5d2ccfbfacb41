"""One worker's connection to the registrar; it never blocks."""

from __future__ import annotations

import json
import socket
import time

from hvdlite.errors import BootstrapError
from hvdlite.launch.elastic.actions import Message
from hvdlite.launch.elastic.messages import MAX_MESSAGE_BYTES
from hvdlite.rendezvous.frames import FrameReader, FrameWriter
from hvdlite.rendezvous.handshake import Job, ServerHandshake, session_keys

_MAX_BACKLOG_BYTES = 4 << 20
_READ_BYTES = 1 << 16


class BacklogError(Exception):
    """The worker does not read what is sent to it."""


class TooLongError(Exception):
    """A message is longer than workers accept."""


class Peer:
    """An authenticated connection, with the frames of both directions. Used by one thread."""

    def __init__(
        self, connection: socket.socket, worker: int, job: Job, handshake: ServerHandshake
    ) -> None:
        from_client, from_server = session_keys(job, handshake.transcript)
        self.connection = connection  # non-blocking; owned
        self.worker = worker  # the number of the worker at the other end
        self.outgoing = bytearray()  # bytes that the kernel has not taken yet
        self.heard_at = time.monotonic()  # when the last bytes came; monotonic
        self.complaint = ""  # why the connection is useless although it has not ended; "" otherwise
        self.closed = False  # whether `close` was called
        self._reader, self._writer = FrameReader(from_client), FrameWriter(from_server)

    def send(self, message: Message) -> None:
        """Queue a message; `flush` writes it."""
        # Raises BacklogError if more than 4 MiB wait for the worker to read them.
        # Raises TooLongError if the message has more than 1 MiB.
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise TooLongError(
                f"the message '{message['kind']}' to the workers has {len(body)} bytes, at most "
                f"{MAX_MESSAGE_BYTES} are allowed; use fewer workers"
            )
        self.outgoing += self._writer.wrap(body)
        if len(self.outgoing) > _MAX_BACKLOG_BYTES:
            raise BacklogError(f"left {len(self.outgoing)} bytes of messages unread")

    def flush(self) -> None:
        """Write as much as the kernel takes now; `read` notices if the connection has ended."""
        while self.outgoing:
            try:
                del self.outgoing[: self.connection.send(self.outgoing)]
            except BlockingIOError:
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

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.connection.close()
