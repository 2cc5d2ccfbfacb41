"""Measure the offset between this host's monotonic clock and that of rank 0's host.

Monotonic clocks count from the boot of their host. In one round, the client notes when it asks and
when the answer arrives, and the server reads its clock in between. If the client assumes that the
server read its clock in the middle, the error is at most half of the round trip. So the quickest of
several rounds has the smallest error (F. Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989).

The timeline needs the offset to put the events of all hosts on one clock.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import NamedTuple

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.deadline import Deadline

ROUNDS = 16
_READING = struct.Struct("<q")


class ClockOffset(NamedTuple):
    """The offset of this host's clock, and its largest error; both in nanoseconds."""

    # A reading of this host's clock plus the offset is a reading of rank 0's clock. Afterwards
    # clocks drift apart, by some microseconds per second unless the hosts synchronise them.

    nanoseconds: int
    error: int


SAME_CLOCK = ClockOffset(0, 0)


def measure_offset(connection: socket.socket, deadline: Deadline) -> ClockOffset:
    """Measure the offset; the peer at the other end calls `answer_readings` meanwhile."""
    # Raises OSError if the connection failed or was too slow; BootstrapError if the peer hung up.
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
    """Answer the questions of the peer's `measure_offset`."""
    # Raises OSError if the connection failed or was too slow; BootstrapError if the peer hung up.
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
