"""Addresses as text: "unix:NAME" (an abstract socket: nothing on disk) or "host:port"."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Sequence

from hvdlite.errors import BootstrapError

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("iII")
_SIOCGIFADDR = 0x8915
_INTERFACE = struct.Struct("16s4s4s16x")  # a name and an IPv4 socket address: family, port, address
UNIX = "unix:"


def listen(address: str) -> socket.socket:
    """Open a listener; a port of 0 lets the kernel choose. Its address is `address_of` it."""
    if address.startswith(UNIX):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = "\0" + address[len(UNIX) :]
    else:
        host, target_port = split_host(address)
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        target = (host, target_port)
    try:
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def fresh_unix_address() -> str:
    """Return a name that nobody can guess."""
    return f"{UNIX}hvdlite-{secrets.token_hex(16)}"


def address_of(listener: socket.socket) -> str:
    """Return the text that `dial` takes."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return UNIX + bytes(name)[1:].decode()
    return f"{name[0]}:{name[1]}"


def dial(address: str, timeout: float) -> socket.socket:
    """Connect, within `timeout` seconds; raises OSError."""
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect("\0" + address[len(UNIX) :])
        except OSError:
            connection.close()
            raise
        if not same_user(connection):
            connection.close()
            raise PermissionError(f"{address} is served by another user")
        return connection
    return socket.create_connection(split_host(address), timeout=timeout)


def split_host(address: str) -> tuple[str, int]:
    """Split "host:port"; an IPv6 address may contain colons."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def interface_address(names: Sequence[str]) -> str:
    """Return the IPv4 address of the first of these network interfaces that has one.

    Raises:
        BootstrapError: none has; the message lists those that this host has.
    """
    found = interface_addresses()
    for name in names:
        if name in found:
            return found[name]
    have = ", ".join(f"{name} ({address})" for name, address in found.items())
    raise BootstrapError(
        f"no network interface of {socket.gethostname()} is called {' or '.join(names)} and has an "
        f"IPv4 address; it has {have or 'none'}"
    )


def interface_addresses() -> dict[str, str]:
    """List this host's network interfaces that have an IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = _INTERFACE.pack(name.encode(), b"", b"")
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
            except OSError:
                continue  # It has no IPv4 address.
            found[name] = socket.inet_ntoa(_INTERFACE.unpack(answer)[2])
    return found


def same_user(connection: socket.socket) -> bool:
    """Say whether a Unix socket's peer is this user; others prove themselves by the token."""
    if connection.family != socket.AF_UNIX:
        return True
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
