"""The loop that watches ranks, moves their output, and ends them together.

`JobLoop` has two subclasses. `Supervisor` runs it in the launcher, over the ranks of this host and
those of others; `Agent` runs it on each other host. When a loop has returned, nothing of the job is
left on its host. A `SignalInbox` turns signals to its process into events of a loop.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from hvdlite.launch.agents import RemoteWorker
from hvdlite.launch.output import StreamReader
from hvdlite.launch.process import (
    Ending,
    Worker,
    job_mark,
    kill_processes,
    processes_with,
    signal_processes,
)
from hvdlite.launch.resources import oom_kills

GRACE = 1.5  # seconds from SIGTERM to SIGKILL, unless the user chose a grace
_LINGER = 1.0  # seconds that background processes may take to end after a successful job
_POLL = 0.02  # seconds between looks at processes that are not children of this one
# A started rank, here or on another host, with the same methods.
AnyRank: TypeAlias = Worker | RemoteWorker
_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = signal.SIGUSR1  # the launcher sends it on to the ranks, which may stop at it


@dataclass
class Stop:
    """A decision to end the job. Times are monotonic, in seconds."""

    terminate_at: float  # when the ranks get the signal `number`
    kill_at: float  # when they are killed; infinity in an agent, whose launcher decides when
    # The exit status of the job, if a signal or a broken console decided to end it; None after a
    # failure, whose status is then taken, and at the end of a successful job.
    status: int | None = None
    number: int = signal.SIGTERM  # the signal that asks the ranks to end
    terminated: bool = False  # whether the ranks got that signal
    killed: bool = False  # whether they were killed


class JobLoop:
    """Runs one host's part of a job from its first rank to its last. Used by one thread."""

    streams: StreamReader  # of the ranks' output; the subclass makes it

    def __init__(self, job_id: bytes, mark: str | None = None) -> None:
        # `mark` is a variable, "NAME=value", that all processes have that this loop may end; by
        # default the job id.
        self._job_id = job_id.hex()
        self._mark = mark or job_mark(self._job_id)
        self.selector = selectors.DefaultSelector()
        self.workers: list[AnyRank] = []  # started, and not retired yet
        self._stop: Stop | None = None
        self._release_at: list[tuple[float, AnyRank]] = []
        self._oom_kills = oom_kills()  # how many there were when a rank was last killed

    def ended(self, worker: AnyRank, ending: Ending) -> None:
        raise NotImplementedError

    def tick(self, now: float) -> float | None:
        """Do what is due at the time `now`; return when to call this again, or None for never."""
        return None

    def on(self, fd: int, call: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, call)

    def watch(self, worker: AnyRank) -> None:
        """Watch a rank that was started; the caller adds the rank's streams."""
        self.workers.append(worker)
        if isinstance(worker, Worker):
            self.on(worker.pidfd, lambda: self._look(worker))

    def run(self, starters: Iterable[Callable[[], None]]) -> None:
        """Start the ranks, and return when nothing of the job is left on this host.

        An OSError says that a rank could not be started; the others have then been ended.
        """
        try:
            for start in starters:
                start()
            while self.goes_on():
                self._turn()
            self._clear_leftovers()
        finally:
            self._kill()
            self.settle()
            self.streams.finish()
            for worker in self.workers:
                self._reap(worker, at_end=True)
            self.selector.close()

    @property
    def running(self) -> list[AnyRank]:
        return [worker for worker in self.workers if worker.ending is None]

    def goes_on(self) -> bool:
        return bool(self.running)

    def _reap(self, worker: AnyRank, at_end: bool = False) -> None:
        complaint = worker.reap(at_end)
        if complaint:
            self.say(complaint)

    def retire(self, worker: AnyRank, well: bool) -> None:
        """Kill the group of a worker that has ended, take its last output, and reap it.

        If it ended `well`, its children may take a moment to end by themselves; otherwise they are
        killed at once, also those in sessions of their own.
        """
        if well:
            self._release_at.append((time.monotonic() + _LINGER, worker))
        else:
            # Its process id may then belong to a foreign process: nothing signals its group again.
            worker.send_signal(signal.SIGKILL)
            self.streams.release(worker.number)
            self.workers.remove(worker)
            self._reap(worker)
            kill_processes(job_mark(self._job_id), f"HVDLITE_WORKER={worker.number}")

    def release_due(self, now: float) -> float | None:
        """Release workers whose children have had their moment; return when the next is due."""
        due = [worker for when, worker in self._release_at if when <= now]
        self._release_at = [one for one in self._release_at if one[0] > now]
        for worker in due:
            self.retire(worker, well=False)
        return min((when for when, _ in self._release_at), default=None)

    def say(self, text: str) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """Called when all ranks have been killed: wait for other hosts, if there are any."""

    def killing(self) -> None:
        """Called when the grace is over, before the remaining ranks are killed."""

    def _turn(self, longest: float = 60.0) -> None:
        """Wait for the next events or deadline, at most `longest` seconds, and handle them."""
        now = time.monotonic()
        times = [now + longest, self.streams.due(now), self.tick(now)]
        if self._stop is not None and not self._stop.killed:
            times.append(self._stop.kill_at if self._stop.terminated else self._stop.terminate_at)
        wait = min(when for when in times if when is not None) - now
        for key, _ in self.selector.select(max(0.0, wait)):
            key.data()
        self.streams.throttle()
        self._advance_stop(time.monotonic())

    def _look(self, worker: Worker) -> None:
        ending = worker.look()
        if ending is not None:
            self.selector.unregister(worker.pidfd)
            self.streams.drain(worker.number)
            if ending.by_signal and ending.status == signal.SIGKILL:
                kills, self._oom_kills = self._oom_kills, oom_kills()
                ending = replace(ending, oom_killed=self._oom_kills > kills)
            self.ended(worker, ending)

    def stop_now(self, status: int, number: int = signal.SIGTERM, grace: float = GRACE) -> None:
        now = time.monotonic()
        self._stop = Stop(now, now + grace, status, number)

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
        # A signal takes longer to reach other hosts, and the last ranks are usually there. So the
        # last ranks get it first: then fewer ranks see others die before their own signal arrives.
        for worker in reversed(self.workers):
            worker.send_signal(number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        kill_processes(self._mark)

    def _clear_leftovers(self) -> None:
        """Let the ranks' children end by themselves for a moment, then end them."""
        # Some children clean up: multiprocessing's resource tracker removes shared memory when its
        # rank has gone.
        now = time.monotonic()
        if self._stop is None:
            self._stop = Stop(now + _LINGER, now + _LINGER + GRACE)
        signalled = False
        while not self._stop.killed and (
            any(worker.lingers for worker in self.workers) or processes_with(self._mark)
        ):
            if self._stop.terminated and not signalled:
                signalled = True
                signal_processes(processes_with(self._mark), signal.SIGTERM)
            self._turn(longest=_POLL)


class SignalInbox:
    """A context manager that turns signals to the launcher into bytes on the descriptor `fd`.

    No signals arrive if another thread than the main one enters it, as in some notebooks.
    """

    def __init__(self, passes_on: bool = False) -> None:
        # `passes_on` also catches `PASSED_ON`, unless this process has a handler for it.
        self._passes_on = passes_on
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[int, object]] = []
        self._wakeup_before = -1

    def __enter__(self) -> SignalInbox:
        """Catch the watched signals, except those that this process ignores (under nohup)."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _WATCHED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before.append((number, signal.signal(number, lambda *_: None)))
        if self._passes_on and signal.getsignal(PASSED_ON) == signal.SIG_DFL:
            self._before.append((PASSED_ON, signal.signal(PASSED_ON, lambda *_: None)))
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.fd)
        os.close(self._write)

    def take(self) -> list[int]:
        try:
            caught = {number for number, _ in self._before}
            return [number for number in os.read(self.fd, 64) if number in caught]
        except BlockingIOError:
            return []
