"""Jobs whose processes a test can find by a mark, whatever their group, session or parent is."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from hvdlite.launch.process import processes_with
from launcher import end_launcher, start_launcher
from patience import HANG, Stopwatch, wait_until


class MarkedJob:
    """hvdlite-run with a mark in its environment, which all its processes inherit.

    Attributes:
        process: hvdlite-run.
        signalled_at: the monotonic time just before the last signal by `signal`.
    """

    def __init__(self, np: int, *command: str, **options: Any) -> None:
        mark = uuid.uuid4().hex
        self._variable = f"TEST_MARK={mark}"
        env = {**options.pop("env", {}), "TEST_MARK": mark}
        self._watch: Stopwatch | None = None
        self.signalled_at = 0.0
        # Without a buffer, `communicate` returns what follows the lines that were read before.
        self.process: subprocess.Popen[bytes] = start_launcher(
            "-np", str(np), *command, env=env, bufsize=0, **options
        )

    def alive(self, *variables: str) -> list[int]:
        """List the live processes of the job that have these variables, too; all without any."""
        return processes_with(self._variable, *variables)

    def wait_until_ready(self, ready: int) -> None:
        """Read stdout until `ready` lines with the word "ready" have come."""
        assert self.process.stdout is not None
        while ready:
            line = self.process.stdout.readline()
            assert line, "hvdlite-run ended before its ranks were ready"
            ready -= b"ready" in line

    def wait_for_stderr(self, words: str) -> str:
        """Read stderr up to the line that has these words, and return the line."""
        assert self.process.stderr is not None
        while line := self.process.stderr.readline():
            if words.encode() in line:
                return line.decode()
        raise AssertionError(f"hvdlite-run never wrote {words!r}")

    def seconds_until_gone(self) -> float:
        """Wait until no process is left; return the seconds since the last `event`, or since now.

        Raises:
            AssertionError: a process is left after HANG.
        """
        watch = self._watch or Stopwatch()
        wait_until(lambda: not self.alive(), "the end of all processes of the job")
        return watch.seconds()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone, and count the seconds from here."""
        self.event()
        self.signalled_at = time.monotonic()
        self.process.send_signal(number)

    def event(self) -> None:
        """Count the seconds that `finish` and `seconds_until_gone` return from here."""
        self._watch = Stopwatch()

    def finish(self) -> tuple[int, str, str, float]:
        """Wait for the launcher; return its status, the rest of stdout and stderr, and the seconds.

        The seconds are those of a `Stopwatch` since the last `event`, such as a signal.
        """
        watch = self._watch or Stopwatch()
        stdout, stderr = self.process.communicate(timeout=HANG)
        seconds = watch.seconds()
        return self.process.returncode, stdout.decode(), stderr.decode(), seconds

    def __enter__(self) -> MarkedJob:
        return self

    def __exit__(self, *_: object) -> None:
        end_launcher(self.process)
        self.seconds_until_gone()


def process_state(pid: int) -> str:
    """Return the letter of a process's state; "" if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # The name before it may contain anything.


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
            with contextlib.suppress(FileNotFoundError):  # It was closed just now.
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


# Python notices a signal that has a handler, as SIGINT has, only after a sleep that it came just
# before. So all programs that get such signals sleep for a moment only, again and again.
SLEEPER = "import time; print('ready', flush=True)\nwhile True: time.sleep(0.05)"
DEAF_SLEEPER = f"import signal; signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN); {SLEEPER}"
