"""Which process has the rank of each worker, and which one to start next; pure, without a clock.

The job has as many worker ranks as it began with. When the worker of a rank dies, the rank waits 1,
2, 4 .. 60 s, and then gets another process, whose number was never used before. A rank whose
workers died too often one after the other gets none any more. Once a worker has finished, nothing
new is started: the others have the rest of the training to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdlite.launch.process.starts import BackOff, Start


@dataclass
class _Running:
    start: Start
    since: float


class WorkerRanks:
    """The worker ranks of a job with parameter servers. Used by one thread."""

    def __init__(self, first: Sequence[Start], fewest: int, restarts: int, now: float) -> None:
        """Begin with one process for each rank."""
        # `first` is the first workers, which run from now on.
        # With fewer live workers than `fewest`, which is at least 1, the job fails.
        self.total = len(first)  # the number of worker ranks
        self.finished = 0  # how many workers have ended well
        # The ranks that get no process any more, because their workers died too often.
        self.given_up: list[int] = []
        self._fewest = fewest
        self._restarts = restarts
        self._running = {start.worker: _Running(start, now) for start in first}
        self._waiting: dict[int, Start] = {}  # by rank: that of the worker that died
        self._deaths = {start.placement.rank: BackOff() for start in first}
        self._over = False
        self._next = max(self._running) + 1

    @property
    def live(self) -> int:
        """The number of workers that run, or have ended well."""
        return len(self._running) + self.finished

    @property
    def done(self) -> bool:
        """Whether the training is over: no worker runs, and none is to be started."""
        return not self._running and not self._waiting

    @property
    def lost(self) -> bool:
        """Whether the job fails, because too few workers live."""
        return self.live < self._fewest

    def ended(self, worker: int, now: float, well: bool) -> float | None:
        """Note the end of a worker."""
        # `well` says whether it has done its work, or has stopped because it was asked to.
        # Returns after how many seconds its rank gets another process; None if it gets none.
        one = self._running.pop(worker)
        rank = one.start.placement.rank
        if well:
            self.finished += 1
            self.stop_starting()
            return None
        deaths = self._deaths[rank]
        pause = deaths.failed(now, now - one.since)
        if self._over:
            return None
        if deaths.failures > self._restarts:
            self.given_up.append(rank)
            return None
        self._waiting[rank] = one.start
        return pause

    def stop_starting(self) -> None:
        """Start nothing any more: a worker or a server has finished its work."""
        self._over = True
        self._waiting.clear()

    def due(self, now: float, usable: Callable[[str], bool]) -> list[Start]:
        """Return the workers to start now; they count as running from now on."""
        # `usable` returns whether a process can be started on a host now.
        starts = []
        for rank, died in list(self._waiting.items()):
            if self._deaths[rank].ready_at <= now and usable(died.host):
                start = replace(died, worker=self._next, joiner=True)
                self._next += 1
                del self._waiting[rank]
                self._running[start.worker] = _Running(start, now)
                starts.append(start)
        return starts

    def wake_at(self, now: float) -> float | None:
        """Return when `due` may have a new answer; None if only events change it."""
        times = [self._deaths[rank].ready_at for rank in self._waiting]
        return min((when for when in times if when > now), default=None)
