"""Ranks without an engine, which write samples of themselves: source text for tests."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.marked import python

NAME = Path(sys.executable).name  # of the job, in the headline
# `report(n)` writes a sample after n steps, in which rank 1 is late.
SAMPLES = """
import os, signal, sys, threading, time
fd = int(os.environ["HVDLITE_LIVE_FD"].split(":")[0])
from hvdlite.live.sample import RankSteps, Sample, Steps
rank, size = int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"])
began, n = time.monotonic(), 0
def report(n, **more):
    late = RankSteps(.3 * n, 0, .06 * n, .15 * n, n, .09 * n, 0, .09 * n)
    other = RankSteps(.3 * n, .09 * n, .06 * n, .06 * n, 0, 0, 0, 0)
    rows = tuple(late if r == 1 else other for r in range(size))
    steps = Steps(n, .51 * n, rows) if rank == 0 else None
    now, host = time.monotonic(), os.environ["HVDLITE_HOSTNAME"]
    os.write(fd, Sample(rank, size, 0, host, os.getpid(), now, began, {"bytes": 1000 * n},
        steps=steps, **more).line())
"""


def live(np: int, code: str, *flags: str) -> list[str]:
    """Build the arguments of hvdlite-run for ranks that run `code`, with --live."""
    return ["--live", *flags, "-np", str(np), *python(code)]
