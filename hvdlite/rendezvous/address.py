"""Listening at, and connecting to, addresses that are text.

An address is "unix:NAME", the name of an abstract Unix socket, which leaves nothing on disk, or
"host:port" for TCP.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.deadline import Deadline

_BACKLOG = 1024
_CROWDED_SECONDS = 0.005  # until the next attempt when a listener's queue is full
_CREDENTIALS = struct.Struct("iII")
_SIOCGIFADDR = 0x8915
_INTERFACE = struct.Struct("16s4s4s16x")  # a name and an IPv4 socket address: family, port, address
UNIX = "unix:"
LOOPBACKS = ("127.0.0.1", "::1")


def listen(address: str) -> socket.socket:
    """Open a listener; with port 0 the kernel chooses one. OSError: it refuses this address."""
    if address.startswith(UNIX):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: Any = "\0" + address[len(UNIX) :]
    else:
        family, target = resolve(address)[0]
        listener = socket.socket(family)
    try:
        # At a fixed port, connections that an earlier start closed linger for a minute (TIME_WAIT).
        # On Linux this option lets a new listener in nevertheless, and never two at a time.
        if listener.family != socket.AF_UNIX and target[1] != 0:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_loopback() -> socket.socket:
    """Open a TCP listener that only this host can reach: IPv4, or IPv6 on a host without it."""
    for host in LOOPBACKS:
        with contextlib.suppress(OSError):
            return listen(f"{host}:0")
    raise OSError(
        errno.EADDRNOTAVAIL,
        f"this host has neither {' nor '.join(LOOPBACKS)}: its loopback interface is down "
        "(`ip link set lo up`)",
    )


def fresh_unix_address() -> str:
    """Return the address of an abstract Unix socket that nobody can guess."""
    return f"{UNIX}hvdlite-{secrets.token_hex(16)}"


def address_of(listener: socket.socket) -> str:
    """Return the address of a listener, as `dial` takes it."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return UNIX + bytes(name)[1:].decode()
    return f"{name[0]}:{name[1]}"


def dial(address: str, deadline: Deadline) -> socket.socket:
    """Connect to an address, and return the socket, which is non-blocking."""
    # OSError: no process listens there, or one of another user does; TimeoutError: the deadline.
    if address.startswith(UNIX):
        name = "\0" + address[len(UNIX) :]
        return _connect(socket.AF_UNIX, name, deadline, address)
    error: OSError | None = None
    for family, target in resolve(address):
        try:
            return _connect(family, target, deadline, address)
        except OSError as latest:
            error = error or latest
    raise error or OSError(f"{address} has no address")


def _connect(family: int, target: Any, deadline: Deadline, address: str) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        error = connection.connect_ex(target)
        # EAGAIN means that the queue of a Unix socket is full (strangers may have filled it). The
        # kernel does not tell when there is room again, so this polls.
        while error == errno.EAGAIN:
            deadline.sleep(_CROWDED_SECONDS)
            error = connection.connect_ex(target)
        if error == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(connection, select.POLLOUT)
            # The kernels connect; how late this thread sees it is not the peer's fault.
            while not poller.poll(0):
                poller.poll(1000 * deadline.check())
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error != 0:
            raise OSError(error, os.strerror(error))
        if not same_user(connection):
            raise PermissionError(f"{address} is served by another user")
    except BaseException:
        connection.close()
        raise
    return connection


def resolve(address: str) -> list[tuple[int, Any]]:
    """Resolve "host:port" into pairs of family and socket address, those of IPv4 first."""
    host, port = split_host(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    targets = [(int(family), target) for family, _, _, _, target in found]
    return sorted(targets, key=lambda one: one[0] != socket.AF_INET)


def split_host(address: str) -> tuple[str, int]:
    """Split "host:port" at the last colon; an IPv6 address contains colons itself."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # getaddrinfo() raises UnicodeError, not OSError, for such names.
        number = int(port) if port.isascii() and port.isdigit() else -1
    except UnicodeError:
        number = -1
    if not host or not 0 <= number < 1 << 16:
        raise BootstrapError(
            f"{address!r} is not an address: give a host and a port, such as node1:23456"
        )
    return host, number


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach "host:port", where host is a numeric address."""
    if address.startswith(UNIX):
        return False
    host = split_host(address)[0].partition("%")[0]
    return ipaddress.ip_address(host).is_loopback


def route_to(address: str) -> str:
    """Return this host's address on the route to another one; connecting UDP sends no packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))
        return str(asked.getsockname()[0])


def interface_address(names: Sequence[str]) -> str:
    """Return the IPv4 address of the first of these network interfaces that has one."""
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
    """Return, by name, the IPv4 address of each of this host's network interfaces that has one."""
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
    """Return whether the peer of a Unix socket is this user; True for TCP."""
    # Peers over TCP prove by the token that they belong to the job.
    if connection.family != socket.AF_UNIX:
        return True
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
