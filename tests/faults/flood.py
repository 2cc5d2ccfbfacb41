"""Strangers: connections that do not belong to the job, and send nothing, or garbage."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from patience import HANG

Address = tuple[socket.AddressFamily, str | tuple[str, int]]
HELLO = struct.Struct("<4sHBx16sII32s")  # the same as in hvdlite/rendezvous/handshake.py


def listening_unix(inodes: set[str]) -> set[Address]:
    """List listening Unix sockets, abstract ones with a leading NUL."""
    found: set[Address] = set()
    accepts_connections = 0x10000
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and int(fields[3], 16) & accepts_connections and fields[6] in inodes:
            found.add((socket.AF_UNIX, fields[7].replace("@", "\0", 1)))
    return found


def listening_tcp(process: psutil.Process) -> set[Address]:
    """List listening TCP sockets."""
    return {
        (connection.family, (connection.laddr.ip, connection.laddr.port))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


class Touch:
    """An object that makes a folder when it is unpickled, as a proof that it was."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def payloads(trap: Path) -> list[bytes]:
    """Return the messages of strangers; unpickling some of them would make the folder `trap`."""
    noise = random.Random(7)
    pickled = pickle.dumps(Touch(trap))
    huge = struct.pack("<I", 0xFFFFFFFF)
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        noise.randbytes(3),
        noise.randbytes(64),
        noise.randbytes(4096),
        huge + noise.randbytes(64),
        pickled,
        struct.pack("<I", len(pickled)) + pickled,
        HELLO.pack(b"HVL1", 1, 1, bytes(16), 0, 0, bytes(32)),
        HELLO.pack(b"HVL1", 1, 2, noise.randbytes(16), 0, 0xFFFFFFFF, bytes(32)) + bytes(32),
        HELLO.pack(b"HVL1", 0xFFFF, 1, bytes(16), 0, 0, bytes(32)),
        b"HVL1",
    ]


@contextlib.contextmanager
def flooded(
    addresses: Iterable[Address], connections: int, idle: int, trap: Path, least: int = 0
) -> Iterator[int]:
    """Send garbage to all addresses in turn, then hold `idle` silent connections open.

    Yields the number of connections that were accepted. There are more connections as long as
    fewer than `least` were: on a busy machine those who accept may not get to run meanwhile.
    """
    accepted = 0
    give_up = time.monotonic() + HANG
    turns = zip(itertools.cycle(sorted(addresses, key=str)), itertools.cycle(payloads(trap)))
    with contextlib.ExitStack() as held:
        for number, ((family, address), payload) in enumerate(turns):
            if number == connections and accepted < least and time.monotonic() < give_up:
                connections += 1
            if number == connections + idle:
                break
            client = socket.socket(family)
            client.setblocking(False)
            with contextlib.suppress(OSError):  # Strangers may be refused, or crowded out.
                client.connect_ex(address)
                accepted += client.send(payload) >= 0
            if number < connections:
                client.close()
            else:
                held.enter_context(client)
        yield accepted


_OTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
names = ["\\0" + name for name in sys.argv[1:]]
print("flooding", flush=True)
while True:
    for name in names:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.setblocking(False)
            try:
                stranger.connect(name)
            except OSError:
                pass  # The queue is full, as it should be.
"""


@contextlib.contextmanager
def flooded_by_another_user(addresses: Iterable[Address], processes: int = 1) -> Iterator[None]:
    """Let user 65534 connect to abstract sockets as fast as it can; this needs root."""
    names = [str(address)[1:] for family, address in addresses if family == socket.AF_UNIX]
    with contextlib.ExitStack() as floods:
        for _ in range(processes):
            flood = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _OTHER_USER, *names], stdout=subprocess.PIPE
            )
            floods.callback(flood.wait)
            floods.callback(flood.kill)
            assert flood.stdout is not None
            floods.enter_context(flood.stdout)
            assert flood.stdout.readline() == b"flooding\n"
        yield
