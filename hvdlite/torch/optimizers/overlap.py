"""Whether a reducer submits buckets during backward, or all of them at its end.

Communication during backward hides behind compute where it has a core of its own, or waits for a
network. Where the ranks of a host occupy all of its cores, it costs more than it hides: it takes
time from backward, and threads wait for each other more often. Which holds is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite import basics

# These steps come before the measurement: allocators, compilers and autotune of convolutions
# settle.
WARMUP = 10
# Each pair is a step with overlap and one without it: one disturbed step decides nothing.
PAIRS = 10
# Overlap stays unless it is slower by more than this share: less is noise.
LEAST_GAIN = 0.02


class Overlap:
    """The choice of one reducer. All of its ranks measure the same steps, each decides alone."""

    # Ranks wait for each other in every step, so they see the same times. Should they decide
    # differently, results are the same.

    def __init__(self, given: bool | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make it with the user's choice; None measures on CPUs."""
        # On GPUs backward() returns before its work is done, and there is overlap.
        on_gpus = any(param.is_cuda for group in groups for param in group["params"])
        self._measures = given is None and not on_gpus and basics.size() > 1
        self._choice = given is not False
        self._steps = 0
        self._began = 0.0
        self._pair = 0.0  # The pair's first step took so many seconds.
        self._differences: list[float] = []  # Steps took so much longer with overlap.
        self._times: list[float] = []

    @property
    def now(self) -> bool:
        """Whether this step submits buckets during backward."""
        if self._measures and self._steps >= WARMUP:
            return (self._steps - WARMUP) % 2 == 0
        return self._choice

    def begin(self) -> None:
        """Note the first gradient of a step."""
        self._began = time.perf_counter()

    def end(self) -> str | None:
        """Note that a step's gradients are reduced; return the choice as text, once it is made."""
        if not self._measures:
            return None
        self._steps += 1
        seconds = time.perf_counter() - self._began
        if self._steps <= WARMUP:
            return None
        if (self._steps - WARMUP) % 2 == 1:
            self._pair = seconds
            return None
        self._differences.append(self._pair - seconds)
        self._times.append(seconds)
        return self._choose() if len(self._differences) == PAIRS else None

    def _choose(self) -> str:
        gain, without = statistics.median(self._differences), statistics.median(self._times)
        self._measures = False
        self._choice = gain <= LEAST_GAIN * without
        when = "during" if self._choice else "at the end of"
        return (
            f"gradients are sent {when} backward(): a step's gradients take "
            f"{1e3 * (without + gain):.1f} ms with overlap, {1e3 * without:.1f} ms without"
        )
