"""Elastic jobs with a fake registrar, whose workers wait for files instead of training."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from launch.marked import MarkedJob, python
from patience import wait_until

DRIVER = (str(Path(__file__).with_name("driver.py")),)
# What every worker begins with: its number, and a function that waits for a file beside the log.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
worker, folder = int(os.environ["HVDLITE_WORKER"]), Path(os.environ["TEST_LOG"]).parent
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
def say(*words):  # in one write, because children of a worker share its stdout
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
say("ready", worker, os.getpid())
"""


class ElasticJob(MarkedJob):
    """An elastic job whose workers run `code` after the prelude; `folder` has its files."""

    def __init__(self, folder: Path, np: int, code: str, *flags: str, **env: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        env = {"TEST_LOG": str(self.log), "OMP_NUM_THREADS": "1", **env}
        super().__init__(np, *flags, *python(PRELUDE + code), program=DRIVER, env=env)
        self.lines: list[str] = []

    def read_until(self, words: str) -> str:
        """Read stdout up to the line that has these words."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            self.lines.append(line.decode())
            if words in self.lines[-1]:
                return self.lines[-1]
        assert self.process.stderr is not None
        raise AssertionError(f"{words!r} never came: {self.lines} {self.process.stderr.read()!r}")

    def pid(self, worker: int) -> int:
        """Return the process id that a worker printed, and read up to it."""
        words = f"] ready {worker} "
        line = next((one for one in self.lines if words in one), None)
        return int((line or self.read_until(words)).split()[-1])

    def make(self, name: str) -> None:
        """Make a file for which workers wait."""
        (self.folder / name).touch()

    def noted(self, words: str) -> str:
        """Wait until the registrar was told something that begins so, and return it."""
        wait_until(lambda: self._told(words), f"the registrar is told: {words}")
        return self._told(words)[0]

    def _told(self, words: str) -> list[str]:
        return [line for line in self.told() if line.startswith(words)]

    def told(self) -> list[str]:
        """List what the registrar was told."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def rewrite(path: Path, text: str) -> None:
    """Replace a file in one go, so that no reader finds it empty."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def short_heartbeat() -> str:
    """Return a heartbeat that the job keeps on this machine, also if the machine is crowded.

    It is ten times as long as a start of Python takes now, and at least 0.8 s.
    """
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return f"{max(0.8, round(10 * (time.monotonic() - started), 1)):g}"
