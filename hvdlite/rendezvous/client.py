"""The dialling side of all connections, and a worker's connection to the registrar."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import descriptors
from hvdlite.rendezvous.address import dial
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    ClientHandshake,
    FrameReader,
    FrameWriter,
    Job,
    Role,
    session_keys,
    title,
)

# A server of another job hangs up at once, but a crowded server of this job may do so, too. So this
# side dials several times.
_QUICK_HANG_UPS = 8
_AGAIN_SECONDS = 0.1
_RETRY_SECONDS = 0.02  # until the next attempt to reach a server that does not listen yet
# Until a server's name is looked up again, because the address may be that of a pod that has gone.
_LOOK_UP_SECONDS = 5.0

_BEATS = 4  # messages "alive" in the time after which a side counts as dead
# How many heartbeats the registrar may be silent: hvdlite-run may be stopped, or get no core, and a
# worker that lives is worth more than an early end. A launcher that has died hangs up.
SILENT_HEARTBEATS = 20
_LINGER_SECONDS = 1.0  # how long `close` waits until the registrar has read the last message
_ALIVE = {"kind": "alive"}


def introduce(
    address: str, job: Job, rank: int, role: Role, deadline: Deadline, dial_seconds: float = 0
) -> tuple[socket.socket, ClientHandshake]:
    """Connect as this rank, and check the proof of the server at the other end."""
    # A server drops clients that are slower than `HANDSHAKE_SECONDS`. So if the server hangs up
    # before its proof, this side dials again, until the deadline, or until the server has hung up
    # quickly `_QUICK_HANG_UPS` times. `dial_seconds` says how long the server's host may take to
    # answer; 0 means until the deadline. The connection, which the caller owns, does not block.
    # OSError: no server can be reached at the address; TimeoutError: the deadline; BootstrapError:
    # the server refuses, does not belong to this job, or does not answer in time.
    client = title(rank, role)
    quick = 0
    while quick < _QUICK_HANG_UPS:
        begun = time.monotonic()
        connection = dial(address, Deadline(dial_seconds, outer=deadline))
        try:
            handshake = ClientHandshake(job, rank, role)
            _shake_hands(connection, handshake, deadline)
            connection.setblocking(False)
            return connection, handshake
        except ConnectionError:  # It hung up.
            connection.close()
        except TimeoutError:
            connection.close()
            raise BootstrapError(
                f"the handshake of {client} failed: its peer did not answer in time; is it "
                "stopped, or its machine overloaded?"
            ) from None
        except BaseException:
            connection.close()
            raise
        if time.monotonic() - begun < HANDSHAKE_SECONDS / 2:
            quick += 1
        deadline.sleep(_AGAIN_SECONDS)
    raise BootstrapError(
        f"the peer closed the connection of {client} during the handshake: it belongs to "
        "another job, or another user"
    )


def reach(
    server: str, address: str, job: Job, rank: int, role: Role, deadline: Deadline
) -> tuple[socket.socket, ClientHandshake]:
    """Introduce this rank to a server that may not listen yet."""
    error: OSError | None = None
    while True:
        try:
            # Under torchrun, rank 0 serves the store, and may not have started it yet.
            if error is not None:
                deadline.sleep(_RETRY_SECONDS)
            return introduce(address, job, rank, role, deadline, _LOOK_UP_SECONDS)
        except OSError as latest:
            if deadline.passed:
                raise BootstrapError(
                    f"{title(rank, role)} cannot reach {server} at {address}: {error or latest}; "
                    "does the launcher still run?"
                ) from latest
            error = latest


def local_host(connection: socket.socket) -> str | None:
    """Return the IP address from which this host reaches the peer; None over a Unix socket."""
    if connection.family == socket.AF_UNIX:
        return None
    return str(connection.getsockname()[0])


def _shake_hands(connection: socket.socket, handshake: ClientHandshake, deadline: Deadline) -> None:
    # What this side sends is far smaller than any socket's buffer.
    connection.sendall(handshake.hello)
    while not handshake.done:
        data = deadline.receive(connection, handshake.wanted())
        if not data:
            raise ConnectionAbortedError
        answer = handshake.feed(data)
        if answer:  # To send nothing fails, too, where the peer has refused and closed by now.
            connection.sendall(answer)


class RegistrarClient:
    """A worker's connection to the registrar of its elastic job, and the thread that reads from it.

    Both sides send JSON objects in frames, and `{"kind": "alive"}` when they have nothing else to
    say. So each side notices when the other one, or the network, has gone silent.
    """

    # Any thread may call `send` and `close`. A forked child closes its copy of the connection.

    def __init__(
        self,
        address: str,
        job: Job,
        worker: int,
        deadline: Deadline,
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[str], None],
        heartbeat: float = 3.0,
    ) -> None:
        # `job` has epoch 0. `on_message` is called on the reading thread with each message but
        # "alive". This thread also sends the heartbeat, so the function must return well within
        # `heartbeat`, and must not raise. `on_end` is called once, on the reading thread, with the
        # reason, when the connection has ended; after `close` it is not.
        self._worker = worker
        self._connection, handshake = reach(
            "the registrar", address, job, worker, Role.MEMBERSHIP, deadline
        )
        from_client, from_server = session_keys(job, handshake.transcript)
        self._writer, self._reader = FrameWriter(from_client), FrameReader(from_server)
        self._on_message, self._on_end = on_message, on_end
        self._heartbeat = heartbeat
        # A registrar that does not read for so long is as dead as one that does not write.
        self._connection.settimeout(SILENT_HEARTBEATS * heartbeat)
        # The IP address from which this host reaches the registrar; None over a Unix socket.
        self.local_host = local_host(self._connection)
        self._sending = threading.Lock()
        self._closing = False
        self._end: str | None = None  # why the connection has ended; set once, under `_sending`
        self._unsent: OSError | None = None  # why nothing can be sent any more; the same
        descriptors.leave_to_parent(self)
        self._thread = threading.Thread(target=self._serve, name="hvdlite-registrar", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        with self._sending:
            if self._end is None and self._unsent is None:
                try:
                    self._connection.sendall(self._writer.wrap(body))
                    return
                except OSError as error:
                    # A part of the frame may be on its way, so nothing can follow it.
                    self._unsent = error
                    self._hang_up()
        # A refusal that has arrived, but was not read yet, says more than the error.
        if self._end is None and threading.current_thread() is not self._thread:
            self._thread.join(_LINGER_SECONDS)
        raise BootstrapError(self._end or self._loss())

    def close(self) -> None:
        """End the connection, after everything that was sent; `on_end` is not called any more."""
        self._closing = True
        with self._sending:
            self._end = self._end or f"worker {self._worker} has closed this connection"
            # If this side closed at once with unread messages, TCP would discard what was sent.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(_LINGER_SECONDS)

    def close_in_child(self) -> None:
        """Close the copy of a forked child, where the reading thread does not exist."""
        self._sending = threading.Lock()
        self._closing = True
        self._end = f"process {os.getpid()} is a forked child of worker {self._worker}"
        self._connection.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _loss(self) -> str:
        return f"worker {self._worker} lost the registrar: {self._unsent or 'it hung up'}"

    def _serve(self) -> None:
        try:
            self._read()
        except OSError as error:
            reason = f"worker {self._worker} lost the registrar: {error}"
        except BootstrapError as error:
            reason = str(error)
        except Exception as error:  # The worker must not wait for a thread that has ended.
            reason = f"worker {self._worker} cannot read what the registrar sent: {error!r}"
        closing = self._closing
        if not closing:
            self._hang_up()
            with self._sending:
                reason = self._end = self._end or reason
        self._connection.close()
        if not closing:
            self._on_end(reason)

    def _read(self) -> NoReturn:
        """Read, and send the heartbeat, until the connection ends."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        room = select.poll()
        room.register(self._connection, select.POLLOUT)
        heard = time.monotonic()
        beat = heard + self._heartbeat / _BEATS
        while True:
            limit = heard + SILENT_HEARTBEATS * self._heartbeat
            left = min(beat, limit) - time.monotonic()
            arrived = poller.poll(max(0.0, 1000 * left))
            late = time.monotonic() >= limit
            # What has arrived counts before the clock, which runs on while this process is stopped,
            # or waits for Python's lock: also between the end of poll() and the look at the clock.
            if arrived or (late and poller.poll(0)):
                if not self._take():
                    raise BootstrapError(self._loss())
                heard = time.monotonic()
            elif late:
                raise BootstrapError(
                    f"worker {self._worker} lost the registrar: it was silent for "
                    f"{SILENT_HEARTBEATS * self._heartbeat:g} s"
                )
            if time.monotonic() >= beat and not self._closing:
                if room.poll(0):  # Otherwise what is on its way says as much.
                    with contextlib.suppress(BootstrapError):  # What has arrived is read first.
                        self.send(_ALIVE)
                beat = time.monotonic() + self._heartbeat / _BEATS

    def _take(self) -> bool:
        """Receive, and handle the messages that are complete; return False at the end."""
        data = self._connection.recv(1 << 16)
        for body in self._reader.feed(data):
            message = json.loads(body)
            if message["kind"] != "alive" and not self._closing:
                self._on_message(message)
                if message["kind"] == "refused":
                    raise BootstrapError(
                        f"the registrar refused worker {self._worker}: {message.get('reason')}"
                    )
        return bool(data)
