"""A rank that dies, and a survivor that measures how long the error took to come."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import NoReturn

from patience import Stopwatch


def die(path: str) -> NoReturn:
    """Leave a running stopwatch in a file, and die of SIGKILL at once."""
    Path(path).write_bytes(pickle.dumps(Stopwatch()))  # All processes have the same clock.
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


def seconds_since_death(path: str) -> float:
    """Return the seconds of the stopwatch that a dead rank left; infinitely many without one."""
    left = Path(path)
    return pickle.loads(left.read_bytes()).seconds() if left.exists() else float("inf")
