"""Elastic jobs with a fake registrar, whose workers wait for files instead of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from launch.marked import MarkedJob, python

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
say("ready", os.getpid())
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
        line = next((one for one in self.lines if one.startswith(f"[{worker}] ready")), None)
        return int((line or self.read_until(f"[{worker}] ready")).split()[-1])

    def make(self, name: str) -> None:
        """Make a file for which workers wait."""
        (self.folder / name).touch()

    def noted(self, words: str) -> str:
        """Wait until the registrar was told something that begins so, and return it."""
        return until(lambda: next((x for x in self.told() if x.startswith(words)), None))

    def told(self) -> list[str]:
        """List what the registrar was told."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def rewrite(path: Path, text: str) -> None:
    """Replace a file in one go, so that no reader finds it empty."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def until(check: Callable[[], object]) -> str:
    """Wait at most 20 s until a check gives something, and return it."""
    deadline = time.monotonic() + 20
    while not (found := check()):
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)
    return str(found)
