"""The launcher's loop: show what the ranks say, and end the job as one.

Timeline of a failure: the first rank that ends badly starts a window (`Failure.window`) in which
the others may still show that they caused it, or raise what hvdlite told them about it; then
SIGTERM to all, SIGKILL after the grace, and the report last of all. A signal to the launcher skips
the window.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import TypeAlias

from hvdlite.launch.console import STDERR, STDOUT, Console
from hvdlite.launch.ending import Ending
from hvdlite.launch.inbox import SignalInbox
from hvdlite.launch.local import Worker
from hvdlite.launch.loop import GRACE, JobLoop, Stop
from hvdlite.launch.output import OutputPump
from hvdlite.launch.remote import RemoteWorker
from hvdlite.launch.report import Failure, describe, root_failure
from hvdlite.launch.resources import oom_kills

_STATUS_OF_CLOSED_OUTPUT = 128 + signal.SIGPIPE
_HURRIED_DRAIN = 0.2  # seconds for the rest of the output after a signal

AnyRank: TypeAlias = Worker | RemoteWorker


class Supervisor(JobLoop[AnyRank]):
    """Runs one job from its first worker to its last. Used by one thread."""

    def __init__(
        self,
        console: Console,
        inbox: SignalInbox,
        job_id: bytes,
        timestamps: bool = False,
        reports: bool = True,
    ) -> None:
        """Borrow the console and the inbox; no worker is watched yet."""
        super().__init__(job_id)
        self._console = console
        self._inbox = inbox
        self._pump = OutputPump(console, self.selector, timestamps)
        self._reports = reports
        self._failures: list[Failure] = []
        self._oom_kills = oom_kills()
        self.on(inbox.fd, self._take_signals)
        self.on(console.wake_fd, self._console_changed)

    @property
    def streams(self) -> OutputPump:
        """What shows the ranks' output."""
        return self._pump

    @property
    def results(self) -> Mapping[int, bytes]:
        """By rank, what it returned to `hvdlite.run`."""
        return self._pump.results

    def add(self, worker: AnyRank, files: tuple[int, int] | None = None) -> None:
        """Watch a rank and show its output, with copies to two files (owned)."""
        self.watch(worker)
        copies = dict(zip((STDOUT, STDERR), files or (), strict=False))
        for sink, pipe in worker.take_pipes().items():
            self._pump.open(worker.rank, pipe, sink, copies.get(sink))

    def ended(self, worker: AnyRank, ending: Ending) -> None:
        """Note how a worker ended; the first bad end begins the end of the job."""
        if ending.ok or (self._stop is not None and self._stop.terminated):
            return
        now = time.monotonic()
        stderr = self._pump.last_words(worker.rank)
        failure = Failure(worker.rank, worker.pid, ending, now, stderr)
        self._failures.append(failure)
        at = now + failure.window
        if self._stop is None:
            self._stop = Stop(at, at + GRACE)
        elif self._stop.status is None and at < self._stop.terminate_at:
            self._stop.terminate_at, self._stop.kill_at = at, at + GRACE

    def complain(self, text: str) -> None:
        """Say that something could not be ended."""
        self._console.say(text)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if self._stop is None or self._stop.status is None:
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                count = sum(worker.ending is None for worker in self._workers)
                self._console.say(f"{name}: stopping {count} ranks (again to kill them at once)")
                self.stop_now(128 + number)
            else:
                self._stop.kill_at = time.monotonic()

    def _console_changed(self) -> None:
        self._console.woken()
        if self._console.broken and (self._stop is None or self._stop.status is None):
            self.stop_now(_STATUS_OF_CLOSED_OUTPUT)

    def conclude(self) -> int:
        """Show the report, wait for the console, and say what to exit with."""
        status = self._stop.status if self._stop is not None else None
        if status is None and self.root is not None:
            status = self.root.ending.code
            if self._reports:
                self._console.write(STDERR, self._report(self.root).encode())
        self._wait_for_console()
        return status or 0

    def _report(self, root: Failure) -> str:
        killed = root.ending.oom_killed or oom_kills() > self._oom_kills
        host = next(worker.host for worker in self._workers if worker.rank == root.rank)
        return describe(root, host, killed)

    @property
    def root(self) -> Failure | None:
        """The failure that the others followed from, if there was any."""
        return root_failure(self._failures) if self._failures else None

    def _wait_for_console(self) -> None:
        """Wait until all output is written: as long as it takes, but not against a signal."""
        if self._stop is not None and self._stop.status is not None:
            self._console.drained(_HURRIED_DRAIN)
            return
        while not self._console.drained(0.1) and not self._inbox.take():
            pass
