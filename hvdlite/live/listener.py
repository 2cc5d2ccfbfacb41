"""Where the page of a job listens, and the token that it asks for."""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.rendezvous.address import address_of, is_loopback, listen, split_host

DEFAULT_ADDRESS = "127.0.0.1:0"
_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{32,512}")  # It fits a header and, quoted, an address.
_SEND_BUFFER = 64 << 10  # A small one soon tells that a browser does not read.
_REMEDIES = {
    errno.EADDRINUSE: "another program listens there; give another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: f"it is not an address of this host; {DEFAULT_ADDRESS} always is",
    errno.EACCES: "give a port from 1024, or 0 for a free one",
}


@dataclass(frozen=True)
class Listener:
    """A socket that listens, and what is asked of those who connect."""

    socket: socket.socket  # The page that serves it closes it.
    host: str  # The user gave the host in this form.
    port: int  # The kernel has chosen the port if 0 was asked for.
    token: str = field(repr=False)  # Every request has to carry this secret.
    token_file: Path | None = None  # The token comes from it; None means that it was drawn.

    @property
    def names(self) -> frozenset[str]:
        """The hosts by which a browser may know this address; the peer's own view adds one more."""
        return frozenset(
            {"localhost", "127.0.0.1", "::1", self.host.lower(), socket.gethostname().lower()}
        )

    @property
    def address(self) -> str:
        """The address to open, without the token."""
        host = socket.gethostname() if _is_wildcard(self.host) else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def lines(self) -> list[str]:
        """Return what to print once: the address, and what the user should know of it."""
        said = [f"live page: {self.address}?token={self.token}"]
        if self.token_file is not None:
            said = [f"live page: {self.address}?token=... with the token in {self.token_file}"]
            if _others_may_read(self.token_file):
                said.append(
                    f"live page: other users of this host can read the token in {self.token_file}; "
                    f"chmod 600 {self.token_file}"
                )
        if not is_loopback(address_of(self.socket)):
            host = socket.gethostname()
            said.append(
                "live page: it has no TLS, so all who see this network's traffic can read the page "
                "and its token; it is safer to listen at 127.0.0.1, and to come by "
                f"ssh -L {self.port}:127.0.0.1:{self.port} {host}"
            )
        return said


def open_listener(address: str = DEFAULT_ADDRESS, token_file: Path | None = None) -> Listener:
    """Listen at "host:port"; port 0 is a free one, and without a file a token is drawn."""
    # The call raises ArgumentError if the address or the file cannot be used.
    token = secrets.token_urlsafe(_TOKEN_BYTES) if token_file is None else read_token(token_file)
    try:
        host = split_host(address)[0]
        listening = listen(address)
    except BootstrapError as error:
        raise ArgumentError(f"the live page cannot listen: {error}") from None
    except OSError as error:
        known = _REMEDIES.get(error.errno or 0, f"give another one, such as {DEFAULT_ADDRESS}")
        raise ArgumentError(
            f"the live page cannot listen at {address}: {error.strerror}; {known}"
        ) from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return Listener(listening, host, listening.getsockname()[1], token, token_file)


def read_token(path: Path) -> str:
    """Read the token from a file; raise ArgumentError if there is none in it."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentError(f"the token of the live page, {path}: {reason}") from None
    if not _TOKEN.fullmatch(text):
        raise ArgumentError(
            f"the token of the live page, {path}: it needs 32 to 512 letters, digits or ._~+/=- "
            f"and nothing else; openssl rand -hex 32 > {path} makes one"
        )
    return text


def _others_may_read(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o044)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
