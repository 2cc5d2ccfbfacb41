"""The dialing side of all connections: reach a server, and prove oneself to it."""

from __future__ import annotations

import socket
import time

from hvdlite.bootstrap.address import dial
from hvdlite.bootstrap.deadline import Deadline
from hvdlite.bootstrap.handshake import HANDSHAKE_SECONDS, ClientHandshake, Job, Role
from hvdlite.errors import BootstrapError

# A server that knows no such job hangs up at once, and so does one that is crowded by strangers.
_QUICK_HANG_UPS = 8
_AGAIN_SECONDS = 0.1


class _HungUpError(Exception):
    """The peer closed the connection before it proved itself."""


def introduce(
    address: str, job: Job, rank: int, role: Role, deadline: Deadline
) -> tuple[socket.socket, ClientHandshake]:
    """Connect as this rank, and have the server at the other end prove itself.

    Whoever is slow here is shown out there after `HANDSHAKE_SECONDS`; so this side dials again when
    the server hangs up before its proof, until the deadline, or until it has hung up at once
    several times.

    Returns:
        The connection, which the caller owns, and the handshake that it opened with.

    Raises:
        OSError: nobody can be reached there; TimeoutError at the deadline.
        BootstrapError: the server refuses, is not of this job, or does not answer in time.
    """
    quick = 0
    while quick < _QUICK_HANG_UPS:
        begun = time.monotonic()
        connection = dial(address, deadline)
        try:
            return connection, _shake_hands(connection, ClientHandshake(job, rank, role), deadline)
        except _HungUpError:
            connection.close()
        except TimeoutError:
            connection.close()
            raise BootstrapError(
                f"the handshake of rank {rank} failed: its peer did not answer in time; is it "
                "stopped, or its machine overloaded?"
            ) from None
        except BaseException:
            connection.close()
            raise
        if time.monotonic() - begun < HANDSHAKE_SECONDS / 2:
            quick += 1
        deadline.sleep(_AGAIN_SECONDS)
    raise BootstrapError(
        f"the peer closed the connection of rank {rank} during the handshake: it belongs to "
        "another job, or another user"
    )


def _shake_hands(
    connection: socket.socket, handshake: ClientHandshake, deadline: Deadline
) -> ClientHandshake:
    try:
        deadline.send(connection, handshake.hello)
        while not handshake.done:
            data = deadline.receive(connection, handshake.wanted())
            if not data:
                raise _HungUpError
            deadline.send(connection, handshake.feed(data))
    except ConnectionError:
        raise _HungUpError from None
    return handshake
