"""The thread of a rank that writes one sample a second to the pipe from its launcher.

It never waits: while the pipe is full, samples are not taken. What grows counts from the beginning,
so that a missing line loses nothing. When nobody reads the pipe any more, the thread ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hvdlite.live.sample import Event, Sample, Stall, Steps

_PERIOD = 1.0  # seconds between two samples
_LONGEST_END = 1.0  # seconds that the end of a world waits for its last sample
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class _Subject:
    """What is reported on: the engine of one world."""

    engine: Callable[[], Any]  # The engine has `live()`; it is not kept alive.
    rank: int
    size: int
    epoch: int


class Reporter:
    """Reports on one engine at a time. Any thread, and a signal handler, may call its methods.

    `pipe` takes the samples. `figures` returns what the training loop has
    observed: "samples" and "values". `period` is in seconds.
    """

    def __init__(
        self,
        pipe: Pipe,
        host: str,
        figures: Callable[[], Mapping[str, Any]] = lambda: {"samples": 0, "values": {}},
        period: float = _PERIOD,
    ) -> None:
        self._pipe = pipe
        self._host = host
        self._figures = figures
        self._period = period
        self._core_wait = CoreWait(Path("/proc/self/task"))
        # Re-entrant, as a signal handler needs it.
        self._orders: queue.SimpleQueue[_Subject | threading.Event] = queue.SimpleQueue()
        self._subject: _Subject | None = None
        self._last: Sample | None = None  # written for the subject of the thread
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether there is an engine to report on."""
        subject = self._subject
        return subject is not None and subject.engine() is not None

    def follow(self, engine: Any, rank: int, size: int, epoch: int) -> None:
        """Report on this engine from now on, instead of another one."""
        self._subject = _Subject(weakref.ref(engine), rank, size, epoch)
        self._orders.put(self._subject)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdlite-live", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Write a last sample, and report on nothing until `follow`."""
        self._subject = None
        thread = self._thread
        if thread is not None and thread.is_alive():
            done = threading.Event()
            self._orders.put(done)
            done.wait(_LONGEST_END)

    def _run(self) -> None:
        # Signals are for the threads of the script. This also turns SIGPIPE into an error.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        subject: _Subject | None = None
        while True:
            try:  # Wait for an order, or until the next sample is due.
                period = None if subject is None else self._period
                order: _Subject | threading.Event | None = self._orders.get(timeout=period)
            except queue.Empty:
                order = None
            try:
                if subject is not None and not isinstance(order, _Subject):
                    self._report(subject, ended=order is not None)
            except OSError:
                return  # Nobody reads the pipe any more.
            except Exception as error:
                rank = "?" if subject is None else subject.rank
                print(f"hvdlite [{rank}] warning: no live view of it: {error!r}", file=sys.stderr)
                subject = None
            if isinstance(order, _Subject):
                subject, self._last = order, None
            elif order is not None:
                subject = None
                order.set()

    def _report(self, subject: _Subject, ended: bool) -> None:
        engine = subject.engine()
        if engine is None:  # The engine of a process group ends without a call of end().
            last, self._last = self._last, None
            if last is not None and self._pipe.ready():
                self._pipe.write(replace(last, events=(), ended=True))
        elif self._pipe.ready():
            self._last = self._sample(subject, engine.live(), ended)
            self._pipe.write(self._last)

    def _sample(self, subject: _Subject, live: Mapping[str, Any], ended: bool) -> Sample:
        observed = self._figures()
        steps = live["steps"]  # of rank 0 alone
        rss, threads = _memory_and_threads(Path("/proc/self/stat").read_text())
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Sample(
            rank=subject.rank,
            size=subject.size,
            epoch=subject.epoch,
            host=self._host,
            pid=os.getpid(),
            time=live["time"],
            began=live["began"],
            counters=dict(live["counters"]),
            cpu=used.ru_utime + used.ru_stime,
            rss=rss,
            switches=used.ru_nivcsw,
            core_wait=self._core_wait.seconds(),
            threads=threads,
            cores=len(os.sched_getaffinity(0)),
            samples=observed["samples"],
            values=dict(observed["values"]),
            events=tuple(Event(*one) for one in live["events"]),
            steps=steps and Steps.of(steps["count"], steps["seconds"], steps["ranks"]),
            stalled=tuple(Stall.of(*one) for one in live["stalled"]),
            ended=ended,
        )


def _memory_and_threads(stat: str) -> tuple[int, int]:
    """Read the bytes of memory and the number of threads from the text of /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()  # The third field of the file is the first one here.
    return int(fields[21]) * _PAGE, int(fields[17])


class CoreWait:
    """How long the threads of this process were ready to run and waited for a processor."""

    def __init__(self, tasks: Path) -> None:
        self._tasks = tasks  # the folder with the kernel's files on each thread
        self._of_thread: dict[str, int] = {}  # nanoseconds
        self._of_ended = 0  # nanoseconds

    def seconds(self) -> float:
        """Return the sum over all threads, also those that have ended; it never falls."""
        # What a thread waited between the last call and its end is not counted.
        now = {}
        for thread in self._tasks.iterdir():
            with contextlib.suppress(OSError):  # The thread has ended, or the kernel does not tell.
                now[thread.name] = int((thread / "schedstat").read_text().split()[1])
        for name, before in self._of_thread.items():
            if now.get(name, -1) < before:  # It has ended, and another one may have its number.
                self._of_ended += before
        self._of_thread = now
        return (self._of_ended + sum(now.values())) / 1e9


class Pipe(Protocol):
    """What a reporter writes to: the pipe to the launcher, or the report of rank 0."""

    def ready(self) -> bool:
        """Return whether there is room for a sample."""

    def write(self, sample: Sample) -> None:
        """Write a sample; raise OSError if nobody reads it."""


class PipeWriter:
    """Writes whole lines to the write end of a pipe, which stays open."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._rest = b""

    def ready(self) -> bool:
        """Complete the line before; return whether it is complete."""
        self._flush()
        return not self._rest

    def write(self, sample: Sample) -> None:
        """Write a line; `ready` writes what does not fit now."""
        self._rest += sample.line()
        self._flush()

    def _flush(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]
        except BlockingIOError:
            pass  # The pipe is full.
