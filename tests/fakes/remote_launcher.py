"""A remote launcher that is not ssh: sockets, and no process that the launcher has to end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class SocketChannel:
    """A channel whose agent has dialled in: one socket for both directions."""

    pid = None

    def __init__(self, reachable: bool) -> None:
        self._here, there = socket.socketpair()
        self.read_fd = self.write_fd = self._here.fileno()
        self._agent: subprocess.Popen[bytes] | None = None
        with there:
            if reachable:
                command = [sys.executable, "-m", "hvdlite.launch.agent"]
                environment = {**os.environ, "PYTHONSAFEPATH": "1"}
                self._agent = subprocess.Popen(
                    command, stdin=there, stdout=there, env=environment, start_new_session=True
                )

    def said(self) -> str:
        return ""

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._here.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        self._here.close()

    def end(self) -> None:
        if self._agent is not None:
            self._agent.wait(20)


class Sockets:
    """The remote launcher; a host called "gone" ends its channel at once."""

    connect_seconds = 60.0
    carries_secrets = True

    def reachable(self, host: str) -> bool:
        return True

    def open(self, host: str) -> SocketChannel:
        return SocketChannel(host != "gone")

    def explain(self, host: str, said: str, status: int | None) -> str:
        return f"{host} has dialled off ({said!r}, {status})"

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        assert hello["hostname"]
        return "127.0.0.1"
