"""Measure how often the live view blames the right rank, and the right phase, for a planted delay.

    python benchmarks/blame.py --np 3

Ranks compute by sleeping, and one of them sleeps longer in each step: by 10 % of the step and 5 ms
at least, before its first gradient ("data or forward") or between its gradients ("backward"). Once
a second a viewer in the launcher looks at the last 5 seconds, as screen and page do. For each
planted delay a job of its own runs, and a JSON line is printed: in what share of the looks rank and
phase were right, and by how much the phases of a rank differed from the step at most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field

from workers import add_common_arguments, hand_on, machine

from hvdlite.launch.description import Description
from hvdlite.launch.job import run_job
from hvdlite.live.findings import straggler
from hvdlite.live.run import Figures, Run
from hvdlite.live.viewer import About, End

BUCKETS, FLOATS = 8, 100_000
FORWARD, BACKWARD = 0.025, 0.025  # seconds
DELAY = max(0.005, 0.1 * (FORWARD + BACKWARD))
WINDOW, SECONDS = 5.0, 30.0
QUICK_WINDOW, QUICK_SECONDS = 2.0, 6.0
PHASES = ("data or forward", "backward")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--late", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    window, seconds = (QUICK_WINDOW, QUICK_SECONDS) if arguments.quick else (WINDOW, SECONDS)
    if arguments.worker:
        train(arguments.late, arguments.phase, seconds)
        return 0
    last = arguments.np - 1
    for late in [last] if arguments.quick else sorted({0, last}):
        for phase in PHASES[: 1 if arguments.quick else 2]:
            looks = Looks(window)
            command = [sys.executable, __file__, "--worker", "--late", str(late), "--phase", phase]
            job = Description(
                [*command, *["--quick"] * arguments.quick],
                arguments.np,
                dict(os.environ, OMP_NUM_THREADS="1"),
                viewers=[lambda _, looks=looks: looks],  # type: ignore[misc]
            )
            status = run_job(job).status
            if status:
                return status
            row = {"benchmark": "blame", "np": arguments.np, "late_rank": late, "phase": phase}
            row |= {"delay_ms": 1e3 * DELAY, **looks.row(late, phase), **machine("torch")}
            hand_on(json.dumps(row), arguments.output)
    return 0


@dataclass
class Looks:
    """A viewer that asks once a second who is late."""

    window: float  # A look is at so many seconds.
    seen: list[Figures] = field(default_factory=list)

    def start(self, run: Run, about: About) -> None:
        """Begin to look."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(run,))
        self._thread.start()

    def stop(self, end: End) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _look(self, run: Run) -> None:
        while not self._over.wait(1.0):
            figures = run.figures(self.window, time.monotonic())
            # Not before the steps of a whole window, so that no start is in it.
            if figures is not None and figures.total_steps > figures.steps >= 1:
                self.seen.append(figures)

    def row(self, late: int, phase: str) -> dict[str, float]:
        """Return in what share of the looks this was found, and how exact the phases were."""
        found = [straggler(figures) for figures in self.seen]
        right = [one for one in found if one is not None and (one.rank, one.phase) == (late, phase)]
        off = [
            abs(rank.backward + rank.waiting + rank.communicating + rank.between - figures.step)
            / figures.step
            for figures in self.seen
            for rank in figures.ranks
        ]
        return {
            "looks": len(found),
            "right": round(len(right) / max(1, len(found)), 3),
            "phases_off": round(max(off, default=0.0), 4),
        }


def train(late: int, phase: str, seconds: float) -> None:
    """Run one rank."""
    import torch

    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    gradients = [torch.zeros(FLOATS) for _ in range(BUCKETS)]
    planted = DELAY if hvd.rank() == late else 0.0
    forward = FORWARD + (planted if phase == PHASES[0] else 0.0)
    backward = BACKWARD + (planted if phase == PHASES[1] else 0.0)
    for _ in range(int(seconds / (FORWARD + BACKWARD + DELAY))):
        time.sleep(forward)
        handles = []
        for index, gradient in enumerate(gradients):
            time.sleep(backward / BUCKETS)
            handles.append(hvd.allreduce_async_(gradient, name=f"gradient.{index}"))
        for handle in handles:
            hvd.synchronize(handle)


if __name__ == "__main__":
    sys.exit(main())
