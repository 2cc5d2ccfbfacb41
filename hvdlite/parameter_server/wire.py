"""Frames between a worker and a server: a header of fixed size, entries of fixed size, raw bytes.

    request   operation, entries, clock, version that the worker has, bytes of the body
    answer    status, 0, number of the last checkpoint, version, bytes of the body

The body of PUSH begins with its entries, one for each gradient, and their bytes follow in that
order. An entry of rows has 8 bytes per row number, then the rows themselves. Both sides compute the
size that a body must have from what they know of the tensors, before they take memory for it. Only
the body of REGISTER, and texts, are JSON or UTF-8. Nothing is unpickled.
"""

from __future__ import annotations

import enum
import itertools
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvdlite.errors import HvdliteError

_FRAME = struct.Struct("<B3xIqQQ")
_ENTRY = struct.Struct("<IIQ")
ENTRY_BYTES = _ENTRY.size
ROW_NUMBER_BYTES = 8
MAX_TEXT_BYTES = 64 << 20  # A body that is text has at most so many.
_KEEPALIVE_SECONDS = 5
_AT_ONCE = 512  # A system call takes so many pieces of memory; the kernel allows 1024.


class Operation(enum.IntEnum):
    REGISTER = 1
    FILL = 2
    PUSH = 3
    PULL = 4
    REPORT = 5
    GOODBYE = 6


class Status(enum.IntEnum):
    DONE = 0
    WAIT = 1  # The server is alive, and the answer follows later.
    FILL_IN = 2  # The worker is to send the values.
    MISMATCH = 3
    REFUSED = 4
    FAILED = 5


class Layout(enum.IntEnum):
    DENSE = 0
    ROWS = 1


class Frame(NamedTuple):
    kind: int  # an `Operation` or a `Status`
    entries: int = 0
    clock: int = 0  # the worker's; an answer has the number of the server's last checkpoint
    # The worker has, or gets, values of this version. A PULL has the bound of staleness plus 1; 0
    # sets no bound.
    version: int = 0
    body: int = 0  # the number of bytes that follow

    def pack(self) -> bytes:
        return _FRAME.pack(*self)


class Entry(NamedTuple):
    tensor: int  # its index among the server's tensors
    layout: int = Layout.DENSE
    rows: int = 0  # the number of row numbers that follow; a dense gradient has none

    def pack(self) -> bytes:
        return _ENTRY.pack(*self)


class HungUpError(HvdliteError):
    """The other side has closed the connection."""


def tune(connection: socket.socket) -> None:
    """Set the options of a connection: no delays, and a dead host is noticed after a while."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    lost = 1000 * 4 * _KEEPALIVE_SECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost)


def send(connection: socket.socket, pieces: Iterable[bytes | memoryview]) -> None:
    rest = iter(pieces)
    while some := list(itertools.islice(rest, _AT_ONCE)):
        views = [memoryview(one).cast("B") for one in some if len(one)]
        while views:
            views = _after(views, connection.sendmsg(views))


def receive(connection: socket.socket, pieces: Iterable[memoryview]) -> None:
    """Fill all pieces of memory; HungUpError at the end."""
    rest = iter(pieces)
    while some := list(itertools.islice(rest, _AT_ONCE)):
        views = [one.cast("B") for one in some if len(one)]
        while views:
            got = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            if got == 0:
                raise HungUpError("the other side closed the connection")
            views = _after(views, got)


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def receive_bytes(connection: socket.socket, count: int) -> bytearray:
    """Receive so many bytes into new memory; raise as `receive` does."""
    data = bytearray(count)
    receive(connection, [memoryview(data)])
    return data


def receive_frame(connection: socket.socket) -> Frame:
    return Frame(*_FRAME.unpack(receive_bytes(connection, _FRAME.size)))


def receive_entries(connection: socket.socket, count: int) -> list[Entry]:
    """Receive the entries of a body; the caller has checked how many; raise as `receive` does."""
    data = receive_bytes(connection, count * ENTRY_BYTES)
    return [Entry(*fields) for fields in _ENTRY.iter_unpack(data)]
