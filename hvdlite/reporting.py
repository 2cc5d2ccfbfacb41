"""Whether this rank tells a view of the job (`hvdlite-run --live`) what it does.

Without a view nothing here starts a thread or imports anything. With one, `hvdlite.live.reporter`
writes to the pipe that the launcher has made. Under another launcher, rank 0 writes a report by
itself if HVDLITE_REPORT names its file.
"""

from __future__ import annotations

import atexit
import sys
import time
from typing import TYPE_CHECKING, Any

from hvdlite import observed
from hvdlite.rendezvous.environment import host_name, live_pipe, report_file

if TYPE_CHECKING:
    from hvdlite.live.reporter import Reporter

_reporter: Reporter | None = None
_decided = False  # It is set when it is known if this process writes a report.


def follow(engine: Any, rank: int, size: int, epoch: int = 0) -> None:
    """Report on this engine from now on, if a view of the job wants it."""
    global _reporter
    if _reporter is None:
        pipe = _pipe(rank, size)
        if pipe is None:
            return
        from hvdlite.live.reporter import Reporter  # Ordinary jobs do not need it.

        _reporter = Reporter(pipe, host_name(), observed.figures)
        atexit.register(end)
    _reporter.follow(engine, rank, size, epoch)


def follow_unless_busy(engine: Any, rank: int, size: int) -> None:
    """Report on the engine of a process group, if no engine is reported on."""
    if _reporter is None or not _reporter.busy:
        follow(engine, rank, size)


def end() -> None:
    """Write the last sample of the world that ends, and forget what `observe` was told."""
    # What `hvd.observe` has counted belongs to the world, and goes on in the next epoch of an
    # elastic job.
    if _reporter is not None:
        _reporter.end()
    observed.forget()


def _pipe(rank: int, size: int) -> int | None:
    """Return the pipe for samples of this process; None if nobody wants them."""
    global _decided
    pipe = live_pipe()
    first, _decided = not _decided, True
    if rank != 0 or not first:  # A later engine may be that of a process group.
        return pipe
    try:
        path = report_file()
        if path is None or pipe is not None:
            return pipe
        from hvdlite.live.report import OwnReport
        from hvdlite.live.run import About

        report = OwnReport(path, _say)
    except Exception as error:  # It must not end the training.
        _say(f"warning: no report: {error}")
        return pipe
    report.start(About(tuple(sys.orig_argv), size, (host_name(),), time.time()))
    atexit.register(report.stop)  # It is registered before `end`, and runs after it.
    return report.pipe


def _say(line: str) -> None:
    print(f"hvdlite [0] {line}", file=sys.stderr, flush=True)
