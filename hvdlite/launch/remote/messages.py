"""Messages between the launcher and the agents on other hosts, over ssh's stdin and stdout.

A frame is a kind, a rank, a length and that many bytes. There is nothing to authenticate: ssh has
done that. What a login shell prints before the agent's first frame is skipped.

Example:
    >>> reader = FrameReader(after_greeting=True)
    >>> reader.feed(b"Welcome!\\n" + GREETING + frame(Kind.OUT, 3, b"hi"))
    [Frame(kind=<Kind.OUT: 6>, rank=3, body=b'hi')]
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import Any

GREETING = b"\0hvdlite-agent\0"
_HEADER = struct.Struct("<BII")
_MOST_NOISE = 1 << 20
_SHOWN = 60  # bytes of what is no frame


class NoFrameError(ValueError):
    """Something else than a frame has arrived: nothing that follows can be understood."""


class Kind(enum.IntEnum):
    """What a frame is about."""

    HELLO = 1  # agent: its version, and what its host is like
    STDIN = 2  # launcher: what every rank reads from its stdin
    START = 3  # launcher: the host's part of the job
    STARTED = 4  # agent: a rank runs; its process id
    REFUSED = 5  # agent: the job cannot start here; why
    OUT = 6  # agent: bytes of a rank's stdout
    ERR = 7  # agent: bytes of a rank's stderr
    RESULT = 8  # agent: bytes of what a rank returns to `hvdlite.run`
    ENDED = 9  # agent: how a rank ended
    DONE = 10  # agent: nothing of the job is left here
    SIGNAL = 11  # launcher: send this signal to a rank
    ALIVE = 12  # launcher: still there


_KINDS = frozenset(Kind)


@dataclass(frozen=True)
class Frame:
    """One message; `rank` is 0 where it is about no rank."""

    kind: Kind
    rank: int
    body: bytes

    def data(self) -> Any:
        """Decode the body of a frame that carries values.

        Raises:
            NoFrameError: it carries none.
        """
        try:
            return json.loads(self.body)
        except ValueError:
            raise NoFrameError(repr(self.body[:_SHOWN])) from None


def frame(kind: Kind, rank: int = 0, body: bytes = b"") -> bytes:
    """Encode one message."""
    return _HEADER.pack(kind, rank, len(body)) + body


def data_frame(kind: Kind, rank: int, data: Any) -> bytes:
    """Encode one message that carries values."""
    return frame(kind, rank, json.dumps(data).encode())


class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self, after_greeting: bool = False, longest: int = 1 << 32) -> None:
        """Expect frames at once, or only after a greeting among anything else.

        Args:
            after_greeting: skip what comes before a greeting.
            longest: bytes of a body; a longer one is refused.
        """
        self._waits = after_greeting
        self._longest = longest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take what arrived; return the frames that it completed.

        Raises:
            NoFrameError: this is none; the text shows what it is.
        """
        self._buffer += data
        if self._waits and not self._greeted():
            return []
        frames = []
        at = 0
        while at + _HEADER.size <= len(self._buffer):
            kind, rank, length = _HEADER.unpack_from(self._buffer, at)
            if kind not in _KINDS or length > self._longest:
                raise NoFrameError(repr(bytes(self._buffer[at : at + _SHOWN])))
            end = at + _HEADER.size + length
            if end > len(self._buffer):
                break
            body = bytes(memoryview(self._buffer)[at + _HEADER.size : end])
            frames.append(Frame(Kind(kind), rank, body))
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
