"""A job that never ran: the lines that its ranks would have written."""

from __future__ import annotations

import math
import random
import time

from hvdlite.live.run import Run
from hvdlite.live.sample import Event, RankSteps, Sample, Stall, Steps

BEGAN = 1000.0  # on rank 0's clock


class MadeUpJob:
    """Ranks that say a line a second. The last one is late in data or forward.

    Args:
        ranks: how many.
        seconds: how long the job has run when this returns.
        hosts: their names, by rank modulo their number.
    """

    def __init__(self, ranks: int, seconds: int = 60, hosts: tuple[str, ...] = ("node1",)) -> None:
        self.run = Run()
        self.ranks = ranks
        self.hosts = hosts
        self.second = 0
        self._noise = random.Random(1)
        self._steps = 0.0
        self._sums = [[0.0] * 7 for _ in range(ranks)]
        self._samples = dict.fromkeys(range(ranks), 0)
        self._begin = time.monotonic() - seconds
        for _ in range(seconds):
            self.say()

    def say(self, events: tuple[Event, ...] = (), stalled: tuple[Stall, ...] = ()) -> None:
        """Have all ranks say their next line; rank 0 tells the events and what is stalled."""
        self.second += 1
        self._train()
        for rank in range(self.ranks):
            steps = Steps(
                round(self._steps),
                sum(self._sums[0][:4]),
                tuple(RankSteps(*row) for row in self._sums),
            )
            sample = Sample(
                rank=rank,
                size=self.ranks,
                epoch=0,
                host=self.hosts[rank % len(self.hosts)],
                pid=100 + rank,
                time=BEGAN + self.second,
                began=BEGAN,
                counters={"bytes": 100_000_000 * round(self._steps)},
                cpu=self.second * (0.98 - 0.1 * rank),
                rss=(1200 + 10 * rank) << 20,
                switches=20 * self.second,
                threads=6,
                cores=16,
                samples=self._samples[rank],
                values={"loss": 2.0 * math.exp(-self.second / 40)},
                events=events if rank == 0 else (),
                steps=steps if rank == 0 else None,
                stalled=stalled if rank == 0 else (),
            )
            self.run.add(sample, self._begin + self.second)

    def _train(self) -> None:
        """Train for a second."""
        late = 0.004 + 0.009 * (self.second % 20 > 7)
        backward = 0.031 + 0.002 * self._noise.random()
        communicating, between = 0.006 + 0.002 * self._noise.random(), 0.0054
        count = 1 / (backward + communicating + between + late)
        self._steps += count
        for rank, sums in enumerate(self._sums):
            last = rank == self.ranks - 1
            waiting = 0.0 if last else late
            row = (backward, waiting, communicating, between + late - waiting)
            row += (1.0, late, 0.0) if last else (0.0, 0.0, 0.0)
            for i, one in enumerate(row):
                sums[i] += count * one
            self._samples[rank] += round(16 * count)
