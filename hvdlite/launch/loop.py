"""The loop of whoever has started ranks: watch them, move their output, end them together.

`Supervisor` runs it in the launcher, over ranks of this host and of others; `Agent` runs it on each
other host. Nothing of the job is left on a host when its loop has returned.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hvdlite.launch.output.streams import StreamReader
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.guardian import job_processes, signal_job
from hvdlite.launch.process.local import Guardian

GRACE = 1.5  # seconds from SIGTERM to SIGKILL, where nobody chose them
_LINGER = 1.0  # seconds that background processes may take to end after a job that went well
_POLL = 0.02  # seconds between looks at processes that are not ours to wait for


class Watched(Protocol):
    """A started rank, on this host or another; see `local.Worker`."""

    pidfd: int
    ending: Ending | None

    @property
    def rank(self) -> int:
        """The rank in the job."""
        ...

    @property
    def group(self) -> int:
        """The process group of this host that has to die with the launcher."""
        ...

    @property
    def lingers(self) -> bool:
        """Say whether it has ended, but something of it is left that this host cannot see."""
        ...

    def look(self) -> Ending | None:
        """Say how it ended, None while it runs."""
        ...

    def signal_group(self, number: int) -> None:
        """Send a signal to it and its children."""
        ...

    def reap(self) -> str | None:
        """Give it up; say what is wrong if it could not be ended."""
        ...


AnyWorker = TypeVar("AnyWorker", bound=Watched)


@dataclass
class Stop:
    """A decision to end the job: from outside (`status` is set) or after a failure.

    Attributes:
        terminate_at: when the ranks are asked to end, with the signal `number`.
        kill_at: when they are killed; infinity where somebody else decides that.
    """

    terminate_at: float
    kill_at: float
    status: int | None = None
    number: int = signal.SIGTERM
    terminated: bool = False
    killed: bool = False


class JobLoop(Generic[AnyWorker]):
    """Runs a host's part of one job from its first worker to its last. Used by one thread."""

    def __init__(self, job_id: bytes) -> None:
        self._job_id = job_id.hex()
        self.selector = selectors.DefaultSelector()
        self._guardian = Guardian(job_id)
        self._workers: list[AnyWorker] = []
        self._stop: Stop | None = None

    @property
    def streams(self) -> StreamReader:
        """What reads the ranks' output."""
        raise NotImplementedError

    def ended(self, worker: AnyWorker, ending: Ending) -> None:
        """Take note of a rank's end; its output has been read."""
        raise NotImplementedError

    def tick(self, now: float) -> float | None:
        """Do what time demands; return when to be called next, if ever."""
        return None

    def on(self, fd: int, call: Callable[[], None]) -> None:
        """Call whenever a descriptor can be read."""
        self.selector.register(fd, selectors.EVENT_READ, call)

    def watch(self, worker: AnyWorker) -> None:
        """Take over a rank that was started; whoever calls adds its streams."""
        self._guardian.watch(worker.group)
        self._workers.append(worker)
        self.on(worker.pidfd, lambda: self._look(worker))

    def run(self, starters: Iterable[Callable[[], None]]) -> None:
        """Start the ranks, each by a call that leads to `watch`; return when nothing is left.

        Raises:
            OSError: a rank could not be started; those that were have been ended.
        """
        try:
            for start in starters:
                start()
            while any(worker.ending is None for worker in self._workers):
                self._turn()
            self._clear_leftovers()
        finally:
            self._kill()
            self.streams.finish()
            self._guardian.dismiss()
            for worker in self._workers:
                complaint = worker.reap()
                if complaint:
                    self.complain(complaint)
            self.selector.close()

    def complain(self, text: str) -> None:
        """Say that something could not be ended."""
        raise NotImplementedError

    def killing(self) -> None:
        """Take note that the grace is over: what is left is killed next."""

    def _turn(self, longest: float = 60.0) -> None:
        """Wait for the next event or deadline and handle it."""
        now = time.monotonic()
        times = [now + longest, self.streams.due(now), self._next_stop_step(), self.tick(now)]
        wait = min(when for when in times if when is not None) - now
        for key, _ in self.selector.select(max(0.0, wait)):
            key.data()
        self.streams.throttle()
        self._advance_stop(time.monotonic())

    def _look(self, worker: AnyWorker) -> None:
        ending = worker.look()
        if ending is not None:
            self.selector.unregister(worker.pidfd)
            self.streams.drain(worker.rank)
            self.ended(worker, ending)

    def stop_now(self, status: int, number: int = signal.SIGTERM, grace: float = GRACE) -> None:
        """Send the signal `number` to all, and SIGKILL after the grace (seconds)."""
        now = time.monotonic()
        self._stop = Stop(now, now + grace, status, number)

    def _next_stop_step(self) -> float | None:
        stop = self._stop
        if stop is None or stop.killed:
            return None
        return stop.kill_at if stop.terminated else stop.terminate_at

    def _advance_stop(self, now: float) -> None:
        stop = self._stop
        if stop is None:
            return
        if not stop.terminated and now >= stop.terminate_at:
            stop.terminated = True
            self._signal(stop.number)
        if not stop.killed and now >= stop.kill_at:
            stop.killed = True
            self.killing()
            self._kill()

    def _signal(self, number: int) -> None:
        # The way to other hosts is longer, and the first ranks are mostly the launcher's own. With
        # the last told first, fewer ranks see others go before they are told themselves.
        for worker in reversed(self._workers):
            worker.signal_group(number)

    def _kill(self) -> None:
        """Kill every group, and what left its group but carries the job's environment."""
        self._signal(signal.SIGKILL)
        signal_job(self._job_id, signal.SIGKILL)

    def _clear_leftovers(self) -> None:
        """Let the workers' children end by themselves, then end them.

        They matter: a resource tracker, for one, removes shared memory when its worker has gone.
        """
        now = time.monotonic()
        if self._stop is None:
            self._stop = Stop(now + _LINGER, now + _LINGER + GRACE)
        signalled = False
        while self._something_left() and not self._stop.killed:
            if self._stop.terminated and not signalled:
                signalled = True
                signal_job(self._job_id, signal.SIGTERM)
            self._turn(longest=_POLL)

    def _something_left(self) -> bool:
        return any(worker.lingers for worker in self._workers) or bool(job_processes(self._job_id))
