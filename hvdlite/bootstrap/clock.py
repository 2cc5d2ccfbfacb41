"""How far this host's monotonic clock is from rank 0's.

Monotonic clocks count from the boot of their host. The client notes when it asks and when the
answer is there; the server's reading was taken in between, so taking it for the middle errs by at
most half of the round trip, and the quickest of several rounds errs least (F. Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989).
"""

from __future__ import annotations

import socket
import struct
import time
from typing import NamedTuple

from hvdlite.bootstrap.deadline import Deadline
from hvdlite.errors import BootstrapError

ROUNDS = 16
_READING = struct.Struct("<q")


class ClockOffset(NamedTuple):
    """What to add to this host's readings to get rank 0's, in nanoseconds; and how far off it is.

    Clocks drift apart afterwards, by some microseconds a second where nothing disciplines them.
    """

    nanoseconds: int
    error: int


SAME_CLOCK = ClockOffset(0, 0)


def measure_offset(connection: socket.socket, deadline: Deadline) -> ClockOffset:
    """Ask the server at the other end, which calls `answer_readings`.

    Raises:
        OSError: the connection failed or was too slow.
    """
    best: ClockOffset | None = None
    for _ in range(ROUNDS):
        asked = time.monotonic_ns()
        connection.sendall(b"?")
        (reading,) = _READING.unpack(_receive(connection, _READING.size, deadline))
        answered = time.monotonic_ns()
        error = (answered - asked + 1) // 2
        if best is None or error < best.error:
            best = ClockOffset(reading - (asked + answered) // 2, error)
    assert best is not None
    return best


def answer_readings(connection: socket.socket, deadline: Deadline) -> None:
    """Answer the questions of one `measure_offset`.

    Raises:
        OSError: the connection failed or was too slow.
    """
    for _ in range(ROUNDS):
        _receive(connection, 1, deadline)
        connection.sendall(_READING.pack(time.monotonic_ns()))


def _receive(connection: socket.socket, length: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < length:
        more = deadline.receive(connection, length - len(data))
        if not more:
            raise BootstrapError("a rank left while the clocks were compared")
        data += more
    return data
