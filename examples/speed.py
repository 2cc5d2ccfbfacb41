"""Measure how fast the examples train, and explain the result. This file does not use hvdlite."""

import math
import os
import time


class Stopwatch:
    """Counts samples, and the time that they take."""

    # Before the first `begin` or `end` a process also imports, traces or compiles code. That
    # may take seconds, and says nothing about the speed of training.

    def __init__(self) -> None:
        self._begin = math.nan
        self._seconds = 0.0
        self._samples = 0

    def begin(self) -> None:
        """Start to count, after a pause that does not count."""
        self._begin = time.perf_counter()

    def end(self, samples: int) -> None:
        """Note the end of something that had this number of samples, and go on counting."""
        now = time.perf_counter()
        if not math.isnan(self._begin):
            self._seconds += now - self._begin
            self._samples += samples
        self._begin = now

    def rate(self) -> float:
        """Return samples per second; NaN if nothing was counted."""
        return self._samples / self._seconds if self._samples else math.nan


def report(rate: float, ranks: int, local_ranks: int, alone: float = math.nan) -> str:
    """Describe a rate, and explain it by the number of this machine's cores."""
    # `rate` is in samples per second of all ranks together, and `alone` in those of one rank that
    # trained alone; NaN if none did.
    if math.isnan(rate):
        return "One epoch is too short to measure the speed."
    text = f"{rate:,.0f} samples/s on {ranks} rank(s)"
    if math.isnan(alone) or ranks == 1:
        return text
    cores = len(os.sched_getaffinity(0))
    if local_ranks > cores:
        meaning = f"{local_ranks} ranks share {cores} core(s) here; their gain needs {local_ranks}."
    elif rate < alone:
        meaning = (
            "Each rank has the fixed costs of a step, which are most of it in so small a model; "
            "and what else runs on its cores holds up all ranks."
        )
    else:
        meaning = f"{ranks} times is the limit; larger models and batches come closer to it."
    return f"{text}, {alone:,.0f} alone: {rate / alone:.2f} times as fast. {meaning}"
