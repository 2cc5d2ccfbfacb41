"""Measure how fast the examples train, and explain the result. This file does not use hvdlite."""

import math
import os
import time


class Stopwatch:
    """Counts samples from the end of the first epoch on."""

    # In its first epoch a process also imports, traces or compiles code. That may take seconds, and
    # says nothing about the speed of training.

    def __init__(self) -> None:
        self._begin = self._end = math.nan
        self._samples = 0

    def end_epoch(self, samples: int) -> None:
        """Note the end of an epoch that had this number of samples."""
        self._end = time.perf_counter()
        if math.isnan(self._begin):
            self._begin = self._end
        else:
            self._samples += samples

    def rate(self) -> float:
        """Return samples per second; NaN before the second epoch has ended."""
        return self._samples / (self._end - self._begin) if self._samples else math.nan


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
