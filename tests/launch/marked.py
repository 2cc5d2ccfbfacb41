"""Jobs whose processes a test can find by a mark, whatever their group, session or parent is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from hvdlite.launch.process.guardian import processes_with
from launcher import end_launcher, start_launcher


class MarkedJob:
    """hvdlite-run with a mark in its environment, which all its processes inherit."""

    def __init__(self, np: int, *command: str, **options: Any) -> None:
        mark = uuid.uuid4().hex
        self._variable = f"TEST_MARK={mark}"
        env = {**options.pop("env", {}), "TEST_MARK": mark}
        self.process: subprocess.Popen[bytes] = start_launcher(
            "-np", str(np), *command, env=env, **options
        )

    def alive(self) -> list[int]:
        """List every live process of the job, including the launcher."""
        return processes_with(self._variable)

    def wait_until_ready(self, ready: int) -> None:
        """Read stdout until `ready` lines with the word "ready" have come."""
        assert self.process.stdout is not None
        while ready:
            line = self.process.stdout.readline()
            assert line, "hvdlite-run ended before its ranks were ready"
            ready -= b"ready" in line

    def seconds_until_gone(self) -> float:
        """Wait until no process is left (at most 10 s), and return how many seconds that took."""
        started = time.monotonic()
        while self.alive() and time.monotonic() < started + 10:
            time.sleep(0.01)
        return time.monotonic() - started

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(number)

    def finish(self) -> tuple[int, str, str, float]:
        """Wait for the launcher; return its status, rest of stdout, stderr, and the seconds."""
        started = time.monotonic()
        stdout, stderr = self.process.communicate(timeout=20)
        seconds = time.monotonic() - started
        return self.process.returncode, stdout.decode(), stderr.decode(), seconds

    def __enter__(self) -> MarkedJob:
        return self

    def __exit__(self, *_: object) -> None:
        end_launcher(self.process)
        self.seconds_until_gone()


def python(code: str) -> list[str]:
    """Build the command of a small script."""
    return [sys.executable, "-c", code]


def listening_inodes() -> set[str]:
    """Collect the inodes of the TCP sockets that listen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add(fields[9])
    return inodes


def sockets_of(pids: list[int]) -> set[str]:
    """Collect the inodes of all sockets of some processes."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


SLEEPER = "print('ready', flush=True); import time; time.sleep(60)"
DEAF_SLEEPER = f"import signal; signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN); {SLEEPER}"
