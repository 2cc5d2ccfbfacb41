"""Frames between a rank and the store, or a worker and the registrar, after the handshake.

A frame has a length, a sequence number, a body and a MAC.

Each direction has a key of its own, derived from the nonces of both sides. The sequence number
prevents replay and reordering. The length is checked before any memory is allocated for it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from hvdlite.errors import BootstrapError

MAX_BODY_BYTES = 4 << 20
_HEADER = struct.Struct("<IQ")
_MAC_BYTES = 16


def _mac(key: bytes, header: bytes, body: bytes) -> bytes:
    return hmac.digest(key, header + body, hashlib.sha256)[:_MAC_BYTES]


class FrameWriter:
    """Wraps bodies into frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def wrap(self, body: bytes) -> bytes:
        """Return the next frame."""
        header = _HEADER.pack(len(body), self._sequence)
        self._sequence += 1
        return header + body + _mac(self._key, header, body)


class FrameReader:
    """Unwraps the frames of one direction from a stream of bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete now."""
        # Raises BootstrapError if the stream was tampered with, or the peer is not a server of
        # hvdlite.
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _HEADER.size:
            length, sequence = _HEADER.unpack_from(self._buffer)
            if length > MAX_BODY_BYTES or sequence != self._sequence:
                raise BootstrapError("a frame is too long or out of order")
            end = _HEADER.size + length
            if len(self._buffer) < end + _MAC_BYTES:
                break
            header = bytes(self._buffer[: _HEADER.size])
            body = bytes(self._buffer[_HEADER.size : end])
            mac = bytes(self._buffer[end : end + _MAC_BYTES])
            if not hmac.compare_digest(mac, _mac(self._key, header, body)):
                raise BootstrapError("a frame was tampered with")
            del self._buffer[: end + _MAC_BYTES]
            self._sequence += 1
            bodies.append(body)
        return bodies
