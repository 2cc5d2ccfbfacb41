"""Ports for addresses that several processes have to know before one of them listens there."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port below those that the kernel gives to everyone who asks for any."""
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as asked, contextlib.suppress(OSError):
            asked.bind((host, port))
            return port
