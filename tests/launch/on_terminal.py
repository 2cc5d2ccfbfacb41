"""hvdlite-run on a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

from launch.marked import process_state
from launcher import end_launcher, start_launcher
from patience import HANG, wait_until
from terminal_screen import TerminalScreen


class TerminalJob:
    """hvdlite-run with a terminal as stdout and stderr, or as one of them; a context manager.

    Attributes:
        screen: what the terminal shows.
        process: hvdlite-run.
    """

    def __init__(self, *arguments: str, width: int, height: int = 40, **options: Any) -> None:
        self._master, slave = pty.openpty()
        self.screen = TerminalScreen(width, height)
        self._set_size(width, height)
        options = {"stdout": slave, "stderr": slave, **options}
        env = {"TERM": "xterm", "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        self.process: subprocess.Popen[bytes] = start_launcher(*arguments, env=env, **options)
        os.close(slave)

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size, without a signal, while nothing is being drawn."""
        # What was drawn for the former size would be taken for lines that wrap in the new one.
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(self.process.pid) == "T", "hvdlite-run is stopped")
        while select.select([self._master], [], [], 0.05)[0] and self.read(0):
            pass
        self._set_size(width, height)
        self.process.send_signal(signal.SIGCONT)

    def _set_size(self, width: int, height: int) -> None:
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        self.screen.width, self.screen.height = width, height

    def read(self, seconds: float) -> bool:
        """Show what comes within these seconds, until it pauses; return whether more may come."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            self.screen.feed_any(os.read(self._master, 1 << 16))
        except OSError:
            return False  # The last writer has gone.
        return True

    def wait_until(self, holds: Callable[[list[str]], bool]) -> None:
        """Read until this holds for the lines shown; a read may end in the midst of a drawing."""
        deadline = time.monotonic() + HANG
        while not holds(self.screen.text):
            more = time.monotonic() < deadline and self.read(0.5)
            assert more, "never shown as wanted, but:\n" + "\n".join(self.screen.text)

    def wait_for(self, *texts: str) -> None:
        """Read until the terminal shows all these texts at once."""
        try:
            self.wait_until(lambda lines: all(text in "\n".join(lines) for text in texts))
        except AssertionError as error:
            raise AssertionError(f"{texts} {error}") from None

    def finish(self, seconds: float = HANG) -> list[str]:
        """Read to the end; return all lines that the terminal has shown."""
        deadline = time.monotonic() + seconds
        while self.read(1.0):
            assert time.monotonic() < deadline, "\n".join(self.screen.text)
        self.process.wait(timeout=HANG)
        return self.screen.text

    def __enter__(self) -> TerminalJob:
        return self

    def __exit__(self, *_: object) -> None:
        end_launcher(self.process)
        os.close(self._master)
