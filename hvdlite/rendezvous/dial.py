"""The dialing side of all connections: connect to a server, and complete the handshake with it."""

from __future__ import annotations

import selectors
import socket
import time

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import dialling
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import HANDSHAKE_SECONDS, ClientHandshake, Job, Role, title
from hvdlite.rendezvous.steps import Pause, Steps, run, sleeping

# A server of another job hangs up at once, but a crowded server of this job may do so, too. So this
# side dials several times.
_QUICK_HANG_UPS = 8
_AGAIN_SECONDS = 0.1
_RETRY_SECONDS = 0.02  # until the next attempt to reach a server that does not listen yet
# Until a server's name is looked up again, because the address may be that of a pod that has gone.
_LOOK_UP_SECONDS = 5.0


class _HungUpError(Exception):
    """The peer closed the connection before it proved itself."""


def introduce(
    address: str, job: Job, rank: int, role: Role, deadline: Deadline, dial_seconds: float = 0
) -> tuple[socket.socket, ClientHandshake]:
    """Connect as this rank, and check the proof of the server at the other end."""
    # A server drops clients that are slower than `HANDSHAKE_SECONDS`. So if the server hangs up
    # before its proof, this side dials again, until the deadline, or until the server has hung up
    # quickly `_QUICK_HANG_UPS` times.
    # `dial_seconds` says how long the server's host may take to answer; 0 means until the deadline.
    # Returns the connection, which the caller owns, and the completed handshake.
    # Raises OSError if no server can be reached at the address; TimeoutError at the deadline.
    # Raises BootstrapError if the server refuses, does not belong to this job, or does not answer
    # in time.
    return run(introducing(address, job, rank, role, deadline, dial_seconds))


def introducing(
    address: str, job: Job, rank: int, role: Role, deadline: Deadline, dial_seconds: float = 0
) -> Steps[tuple[socket.socket, ClientHandshake]]:
    """Return the steps of `introduce`; the connection is non-blocking."""
    client = title(rank, role)
    quick = 0
    while quick < _QUICK_HANG_UPS:
        begun = time.monotonic()
        connection = yield from dialling(address, Deadline(dial_seconds, outer=deadline))
        try:
            handshake = ClientHandshake(job, rank, role)
            yield from _shaking_hands(connection, handshake, deadline)
            return connection, handshake
        except _HungUpError:
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
        yield from sleeping(_AGAIN_SECONDS, deadline)
    raise BootstrapError(
        f"the peer closed the connection of {client} during the handshake: it belongs to "
        "another job, or another user"
    )


def reach(
    server: str, address: str, job: Job, rank: int, role: Role, deadline: Deadline
) -> tuple[socket.socket, ClientHandshake]:
    """Introduce this rank to a server that may not listen yet."""
    # Raises BootstrapError if the server cannot be reached until the deadline, or refuses.
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


def _shaking_hands(
    connection: socket.socket, handshake: ClientHandshake, deadline: Deadline
) -> Steps[None]:
    try:
        # What this side sends is far smaller than any socket's buffer.
        connection.sendall(handshake.hello)
        while not handshake.done:
            try:
                data = connection.recv(handshake.wanted())
            except BlockingIOError:
                deadline.check()
                yield Pause(deadline.at, connection.fileno(), selectors.EVENT_READ)
                continue
            if not data:
                raise _HungUpError
            answer = handshake.feed(data)
            if answer:  # To send nothing fails, too, where the peer has refused and closed by now.
                connection.sendall(answer)
    except ConnectionError:
        raise _HungUpError from None
