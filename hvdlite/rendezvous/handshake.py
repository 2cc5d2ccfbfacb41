"""The handshake that opens every connection: both sides prove that they know the job's secret.

    client -> server   hello   magic, version, role, job id, epoch, rank, nonce
    server -> client   reply   status, version, epoch, nonce
    client -> server   proof   HMAC(key, "c" + hello + reply)
    server -> client   proof   HMAC(key, "s" + hello + reply)

All four messages have a fixed size, so a stranger cannot make this side allocate memory. The client
proves itself first, so that a server never computes a proof for a stranger. The labels "c" and "s"
prevent reflection, and the nonces prevent replay. The epoch and the rank in the hello exclude
processes of an earlier start and mixed-up peers. The server tells the reason of a refusal only for
another version or epoch.

After it, the store and the registrar exchange *frames* with their clients: a length, a sequence
number, a body and a MAC. Each direction has a key of its own, derived from the nonces of both
sides. The sequence number prevents replay and reordering. The length is checked before any memory
is allocated for it.

The state machines here do not perform I/O: `feed` takes bytes that arrived and returns bytes to
send, or the bodies of complete frames.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from hvdlite.errors import BootstrapError

PROTOCOL_VERSION = 8
EPOCHS = range(1 << 32)  # the numbers that a handshake can carry
TOKEN_BYTES = 32  # A job's secret has so many.
JOB_ID_BYTES = 16  # A job's public number has so many.
HANDSHAKE_SECONDS = 2.0

_MAGIC = b"HVL1"
_HELLO = struct.Struct("<4sHBx16sII32s")
_REPLY = struct.Struct("<BxHI32s")
_PROOF_BYTES = 32
_NONCE_BYTES = 32

_MAX_BODY_BYTES = 4 << 20
_FRAME_HEADER = struct.Struct("<IQ")
_MAC_BYTES = 16


class Role(enum.IntEnum):
    STORE = 1
    CONTROL = 2
    DATA = 3
    MEMBERSHIP = 4
    NODE = 5
    PARAMETER = 6


_NOUNS: dict[int, str] = {Role.MEMBERSHIP: "worker", Role.NODE: "node", Role.PARAMETER: "worker"}


def title(rank: int, role: int) -> str:
    """Name a client in messages; an elastic worker gives its number, because it has no rank yet."""
    return f"{_NOUNS.get(role, 'rank')} {rank}"


class Refusal(enum.IntEnum):
    """The first byte of a reply."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    OTHER_EPOCH = 2


class RefusedError(BootstrapError):
    """The other side does not belong to this job; the message says what is known about it."""


class OtherEpochError(RefusedError):
    """The other side belongs to another epoch of this job."""


@dataclass(frozen=True)
class Job:
    """What all ranks of one epoch of one job share; the token is never shown."""

    token: bytes  # the secret
    job_id: bytes  # the public number
    epoch: int

    @classmethod
    def drawn(cls, epoch: int = 0) -> Job:
        """Draw the secret and the number of a new job."""
        return cls(secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(JOB_ID_BYTES), epoch)

    def key(self) -> bytes:
        return hmac.digest(self.token, b"hvdlite-1" + self.job_id, hashlib.sha256)

    def __repr__(self) -> str:
        return f"Job(job_id={self.job_id.hex()}, epoch={self.epoch})"


def _proof(job: Job, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(job.key(), label + transcript, hashlib.sha256)


def session_keys(job: Job, transcript: bytes) -> tuple[bytes, bytes]:
    """Derive the keys for frames from the client and for frames from the server."""
    return _proof(job, b"client frames", transcript), _proof(job, b"server frames", transcript)


class _Side:
    """The part that both sides share: it collects the fixed-size messages of the other side."""

    def __init__(self, job: Job, first_bytes: int) -> None:
        self._job = job
        self._first_bytes = first_bytes  # The message after it, the last one, is a proof.
        self._received = bytearray()
        self.transcript = b""
        self.done = False

    def wanted(self) -> int:
        """Return how many bytes of the next message are still missing."""
        expected = _PROOF_BYTES if self.transcript else self._first_bytes
        return expected - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wanted()` bytes; return what to send now."""
        self._received += data
        if self.wanted() > 0:
            return b""
        message, self._received = bytes(self._received), bytearray()
        return self._handle(message)

    def _handle(self, message: bytes) -> bytes:
        raise NotImplementedError

    def _check_proof(self, label: bytes, message: bytes) -> None:
        if not hmac.compare_digest(message, _proof(self._job, label, self.transcript)):
            raise RefusedError("the other side does not know the secret of this job")


class ClientHandshake(_Side):
    """The connecting side. Send `hello` first, then feed."""

    def __init__(self, job: Job, rank: int, role: Role) -> None:
        super().__init__(job, _REPLY.size)
        self._name = title(rank, role)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, role, job.job_id, job.epoch, rank, nonce)

    def _handle(self, message: bytes) -> bytes:
        if self.transcript:
            self._check_proof(b"s", message)
            self.done = True
            return b""
        status, version, epoch, _ = _REPLY.unpack(message)
        if status == Refusal.OTHER_VERSION:
            raise RefusedError(
                f"{self._name} speaks version {PROTOCOL_VERSION} of hvdlite's protocol, its "
                f"peer version {version}; install the same hvdlite on every host"
            )
        if status == Refusal.OTHER_EPOCH:
            raise OtherEpochError(
                f"{self._name} belongs to epoch {self._job.epoch} of the job, its peer to "
                f"epoch {epoch}; it is a leftover of an earlier start, or its peer is: end it"
            )
        if status != Refusal.ACCEPTED:
            raise RefusedError("the peer sent an unknown reply")
        self.transcript = self.hello + message
        return _proof(self._job, b"c", self.transcript)


class ServerHandshake(_Side):
    """The accepting side. Once `done`, `rank` and `role` are those of the client."""

    def __init__(self, job: Job, size: int) -> None:
        super().__init__(job, _HELLO.size)
        self._size = size
        self.rank = -1
        self.role = Role.STORE
        self.refusal: bytes | None = None

    def _handle(self, message: bytes) -> bytes:
        if self.transcript:
            self._check_proof(b"c", message)
            self.done = True
            return _proof(self._job, b"s", self.transcript)
        magic, version, role, job_id, epoch, rank, _ = _HELLO.unpack(message)
        if magic != _MAGIC:
            raise RefusedError("a stranger spoke another protocol")
        if version != PROTOCOL_VERSION:
            who = title(rank, role)
            return self._refuse(Refusal.OTHER_VERSION, f"version {version} from {who}")
        if not hmac.compare_digest(job_id, self._job.job_id):
            raise RefusedError("a stranger named another job")
        if epoch != self._job.epoch:
            return self._refuse(Refusal.OTHER_EPOCH, f"epoch {epoch} from {title(rank, role)}")
        if rank >= self._size or role not in set(Role):
            raise RefusedError("a stranger named a rank or a role that does not exist")
        self.rank, self.role = rank, Role(role)
        reply = self._reply(Refusal.ACCEPTED)
        self.transcript = message + reply
        return reply

    def _reply(self, status: Refusal) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _REPLY.pack(status, PROTOCOL_VERSION, self._job.epoch, nonce)

    def _refuse(self, status: Refusal, why: str) -> bytes:
        """Store the reply with the reason, which the caller sends before it closes, and raise."""
        self.refusal = self._reply(status)
        raise (OtherEpochError if status == Refusal.OTHER_EPOCH else RefusedError)(why)


def _mac(key: bytes, header: bytes, body: bytes) -> bytes:
    return hmac.digest(key, header + body, hashlib.sha256)[:_MAC_BYTES]


class FrameWriter:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def wrap(self, body: bytes) -> bytes:
        if len(body) > _MAX_BODY_BYTES:
            raise BootstrapError(
                f"a message of {len(body)} bytes is too long: at most {_MAX_BODY_BYTES} are allowed"
            )
        header = _FRAME_HEADER.pack(len(body), self._sequence)
        self._sequence += 1
        return header + body + _mac(self._key, header, body)


class FrameReader:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete now."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _FRAME_HEADER.size:
            length, sequence = _FRAME_HEADER.unpack_from(self._buffer)
            if length > _MAX_BODY_BYTES or sequence != self._sequence:
                raise BootstrapError("a frame is too long or out of order")
            end = _FRAME_HEADER.size + length
            if len(self._buffer) < end + _MAC_BYTES:
                break
            header = bytes(self._buffer[: _FRAME_HEADER.size])
            body = bytes(self._buffer[_FRAME_HEADER.size : end])
            mac = bytes(self._buffer[end : end + _MAC_BYTES])
            if not hmac.compare_digest(mac, _mac(self._key, header, body)):
                raise BootstrapError("a frame was tampered with")
            del self._buffer[: end + _MAC_BYTES]
            self._sequence += 1
            bodies.append(body)
        return bodies
