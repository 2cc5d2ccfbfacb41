"""The launcher's loop: watch the workers, move their output, end the job as one.

Timeline of a failure: the first rank that ends badly starts a window (`CAUSE_WINDOW`) in which the
others may still show that they caused it, or raise what hvdlite told them about it; then SIGTERM to
all, SIGKILL after the grace, and the report last of all. A signal to the launcher skips the window.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hvdlite.launch.console import STDERR, STDOUT, Console
from hvdlite.launch.guardian import job_processes, signal_job
from hvdlite.launch.local import Guardian, Worker
from hvdlite.launch.output import OutputPump, Stream
from hvdlite.launch.report import CAUSE_WINDOW, Failure, describe, root_failure
from hvdlite.launch.resources import oom_kills

_GRACE = 1.5  # seconds from SIGTERM to SIGKILL
_LINGER = 1.0  # seconds that background processes may take to end after a job that went well
_POLL = 0.02  # seconds between looks at processes that are not ours to wait for
_STATUS_OF_CLOSED_OUTPUT = 128 + signal.SIGPIPE
_HURRIED_DRAIN = 0.2  # seconds for the rest of the output after a signal
_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A worker with pipes for its output, and files that get a copy; the supervisor owns both.
Started: TypeAlias = tuple[Worker, tuple[int, int] | None]


@dataclass
class Stop:
    """A decision to end the job: from outside (`status` is set) or after a failure."""

    terminate_at: float
    kill_at: float
    status: int | None = None
    terminated: bool = False
    killed: bool = False


class SignalInbox:
    """Turn signals to the launcher into bytes on a descriptor, while entered."""

    def __init__(self) -> None:
        """Prepare the descriptor; nothing is caught yet."""
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[int, object]] = []

    def __enter__(self) -> SignalInbox:
        """Catch what is watched (and not ignored by whoever started us, as nohup does)."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _WATCHED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before.append((number, signal.signal(number, lambda *_: None)))
        return self

    def __exit__(self, *_: object) -> None:
        """Catch no more."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]

    def take(self) -> list[int]:
        """List the signals that came."""
        try:
            return [number for number in os.read(self.fd, 64) if number in _WATCHED]
        except BlockingIOError:
            return []


class Supervisor:
    """Runs one job from its first worker to its last. Used by one thread."""

    def __init__(
        self, console: Console, inbox: SignalInbox, job_id: bytes, timestamps: bool = False
    ) -> None:
        """Borrow the console and the inbox; no worker is watched yet."""
        self._console = console
        self._inbox = inbox
        self._job_id = job_id.hex()
        self._selector = selectors.DefaultSelector()
        self._pump = OutputPump(console, self._selector, timestamps)
        self._guardian = Guardian(job_id)
        self._workers: list[Worker] = []
        self._failures: list[Failure] = []
        self._stop: Stop | None = None
        self._oom_kills = oom_kills()
        self._on(inbox.fd, self._take_signals)
        self._on(console.wake_fd, self._console_changed)

    def _on(self, fd: int, call: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, call)

    def _add(self, worker: Worker, files: tuple[int, int] | None) -> None:
        self._guardian.watch(worker)
        self._workers.append(worker)
        pipes = (worker.process.stdout, worker.process.stderr)
        for pipe, sink, file in zip(pipes, (STDOUT, STDERR), files or (None, None), strict=True):
            assert pipe is not None
            self._pump.add(Stream(worker.rank, os.dup(pipe.fileno()), sink, file))
            pipe.close()
        self._on(worker.pidfd, lambda: self._ended(worker))

    def run(self, starters: Iterable[Callable[[], Started]]) -> int:
        """Start the ranks, loop until nothing of the job is left; return the exit status.

        Raises:
            OSError: a rank could not be started; those that were have been ended.
        """
        try:
            for start in starters:
                self._add(*start())
            while any(worker.ending is None for worker in self._workers):
                self._turn()
            self._clear_leftovers()
        finally:
            self._kill()
            self._pump.finish()
            self._guardian.dismiss()
            for worker in self._workers:
                if not worker.reap():
                    self._console.say(f"rank {worker.rank} (pid {worker.pid}) cannot be killed")
        return self._conclude()

    def _turn(self, longest: float = 60.0) -> None:
        """Wait for the next event or deadline and handle it."""
        now = time.monotonic()
        deadlines = [now + longest, self._pump.show_rests(now), self._next_stop_step()]
        wait = min(when for when in deadlines if when is not None) - now
        for key, _ in self._selector.select(max(0.0, wait)):
            key.data()
        self._pump.throttle()
        self._advance_stop(time.monotonic())

    def _ended(self, worker: Worker) -> None:
        """Note how a worker ended; the first bad end begins the end of the job."""
        ending = worker.look()
        if ending is None:
            return
        now = time.monotonic()
        self._selector.unregister(worker.pidfd)
        self._pump.drain(worker.rank)
        if ending.ok or (self._stop is not None and self._stop.terminated):
            return
        stderr = self._pump.tail_of(worker.rank, STDERR)
        self._failures.append(Failure(worker.rank, worker.pid, ending, now, stderr))
        if self._stop is None:
            self._stop = Stop(now + CAUSE_WINDOW, now + CAUSE_WINDOW + _GRACE)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if self._stop is None or self._stop.status is None:
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                count = sum(worker.ending is None for worker in self._workers)
                self._console.say(f"{name}: stopping {count} ranks (again to kill them at once)")
                self._stop_now(128 + number)
            else:
                self._stop.kill_at = time.monotonic()

    def _console_changed(self) -> None:
        self._console.woken()
        if self._console.broken and (self._stop is None or self._stop.status is None):
            self._stop_now(_STATUS_OF_CLOSED_OUTPUT)

    def _stop_now(self, status: int) -> None:
        now = time.monotonic()
        self._stop = Stop(now, now + _GRACE, status)

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
            self._signal(signal.SIGTERM)
        if not stop.killed and now >= stop.kill_at:
            stop.killed = True
            self._kill()

    def _signal(self, number: int) -> None:
        for worker in self._workers:
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
            self._stop = Stop(now + _LINGER, now + _LINGER + _GRACE)
        signalled = False
        while job_processes(self._job_id) and not self._stop.killed:
            if self._stop.terminated and not signalled:
                signalled = True
                signal_job(self._job_id, signal.SIGTERM)
            self._turn(longest=_POLL)

    def _conclude(self) -> int:
        """Show the report, wait for the console, and say what to exit with."""
        status = self._stop.status if self._stop is not None else None
        if status is None and self._failures:
            root = root_failure(self._failures)
            status = root.ending.code
            killed = oom_kills() > self._oom_kills
            self._console.write(STDERR, describe(root, socket.gethostname(), killed).encode())
        self._wait_for_console()
        return status or 0

    def _wait_for_console(self) -> None:
        """Wait until all output is written: as long as it takes, but not against a signal."""
        if self._stop is not None and self._stop.status is not None:
            self._console.drained(_HURRIED_DRAIN)
            return
        while not self._console.drained(0.1) and not self._inbox.take():
            pass
