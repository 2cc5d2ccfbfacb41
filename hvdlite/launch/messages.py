"""Messages between the launcher and the agents on other hosts.

The agent says hello, gets its part of the job and says that it is ready. Then the launcher has it
start, signal and finish one process at a time, and both say regularly that they are there. A frame
is a kind, the number of a process, a length and that many bytes. What carries frames authenticates
both sides: ssh, srun, or a sealed channel (`sealed`). The reader skips what a login shell prints
before the agent's greeting.
"""

from __future__ import annotations

import enum
import json
import os
import selectors
import struct
import time
from dataclasses import dataclass
from typing import Any

GREETING = b"\0hvdlite-agent\0"
_HEADER = struct.Struct("<BII")
_MOST_NOISE = 1 << 20  # bytes before the greeting that are kept to search in
_SHOWN = 60  # bytes that a message shows of something that is not a frame


class NoFrameError(ValueError):
    """Something that is not a frame has arrived, so nothing after it can be understood."""


class Kind(enum.IntEnum):
    """The meaning of a frame, after the side that sends it."""

    HELLO = 1  # agent: its version, and the name and cores of its host
    STDIN = 2  # launcher: the bytes that every process reads from its stdin
    PART = 3  # launcher: what the processes of this host have in common
    READY = 4  # agent: it can start processes
    REFUSED = 5  # agent: the job cannot run here; carries the reason
    OUT = 6  # agent: bytes of a process's stdout
    ERR = 7  # agent: bytes of a process's stderr
    RESULT = 8  # agent: bytes of a process's result for `hvdlite.run`
    LIVE = 9  # agent: bytes of a process's samples for a view of the job
    START = 10  # launcher: start this process
    STARTED = 11  # agent: it runs; carries its process id
    SIGNAL = 12  # launcher: send this signal to a process, and SIGKILL to its children, too
    ENDED = 13  # agent: a process has ended; carries how
    FINISH = 14  # launcher: end what a process that has ended has left, and forget it
    ALIVE = 15  # both: it is still there
    CAUGHT = 16  # agent: it got a signal, about which the launcher decides
    CLOSE = 17  # launcher: no other process will be started here; a SIGKILL now is for all
    DONE = 18  # agent: nothing of the job is left here
    OUTCOME = 19  # launcher: the job is over; carries its status and, if it did not start, why


_KINDS = frozenset(Kind)


@dataclass(frozen=True)
class Frame:
    """One message; `number` is 0 if the message does not concern a single process."""

    kind: Kind
    number: int
    body: bytes

    def data(self) -> Any:
        """Decode the body of a frame that carries JSON; a NoFrameError says that it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise NoFrameError(repr(self.body[:_SHOWN])) from None


def frame(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    return _HEADER.pack(kind, number, len(body)) + body


def data_frame(kind: Kind, number: int, data: Any) -> bytes:
    return frame(kind, number, json.dumps(data).encode())


class FrameReader:
    def __init__(self, after_greeting: bool = False, longest: int = 1 << 32) -> None:
        # `after_greeting` says whether to skip everything before the agent's greeting.
        # `longest` is the most bytes that a body may have; a longer one is not a frame.
        self._waits = after_greeting
        self._longest = longest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes; return the frames that they complete. A NoFrameError shows what is none."""
        self._buffer += data
        if self._waits and not self._greeted():
            return []
        frames = []
        at = 0
        while at + _HEADER.size <= len(self._buffer):
            kind, number, length = _HEADER.unpack_from(self._buffer, at)
            if kind not in _KINDS or length > self._longest:
                raise NoFrameError(repr(bytes(self._buffer[at : at + _SHOWN])))
            end = at + _HEADER.size + length
            if end > len(self._buffer):
                break
            body = bytes(memoryview(self._buffer)[at + _HEADER.size : end])
            frames.append(Frame(Kind(kind), number, body))
            at = end
        del self._buffer[:at]
        return frames

    def _greeted(self) -> bool:
        at = self._buffer.find(GREETING)
        if at < 0:
            del self._buffer[: max(0, len(self._buffer) - _MOST_NOISE)]
            return False
        del self._buffer[: at + len(GREETING)]
        self._waits = False
        return True


class FrameChannel:
    """Frames over two descriptors, which may be the same. Writing never blocks."""

    def __init__(
        self, read_fd: int, write_fd: int, reader: FrameReader, greeting: bytes = b""
    ) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self.heard_at = time.monotonic()  # when something came last, a monotonic time
        self.gone = False  # whether the other side has ended the connection
        self._reader = reader
        self._out = bytearray(greeting)
        self._broken = False  # whether the other side takes nothing any more

    @property
    def waiting(self) -> int:
        """The number of bytes that the other side has not taken yet."""
        return len(self._out)

    def send(self, data: bytes) -> None:
        """Queue a frame and write what can be written; drop it if the other side is gone."""
        if not (self.gone or self._broken):
            self._out += data
            self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self.write_fd, memoryview(self._out)[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self._broken = True  # What it has sent before can still be read.
            self._out.clear()

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; set `gone` at the end of the connection."""
        try:
            data = os.read(self.read_fd, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.gone = True
            self._out.clear()
        self.heard_at = time.monotonic()
        return self._reader.feed(data)

    def watch(self, selector: selectors.BaseSelector, reads: bool, data: object) -> None:
        """Have a selector watch for room for what waits and, if `reads`, for what arrives."""
        wanted = {self.read_fd: 0, self.write_fd: 0}
        wanted[self.read_fd] |= selectors.EVENT_READ if reads and not self.gone else 0
        wanted[self.write_fd] |= selectors.EVENT_WRITE if self._out and not self.gone else 0
        for fd, events in wanted.items():
            watch_for(selector, fd, events, data)


def watch_for(selector: selectors.BaseSelector, fd: int, events: int, data: object = None) -> None:
    """Watch a descriptor for these events alone; a selector cannot watch for none by itself."""
    watched = selector.get_map().get(fd)
    if watched is not None and watched.events != events:
        selector.unregister(fd)
        watched = None
    if watched is None and events:
        selector.register(fd, events, data)
