"""Whether this rank tells a view of the job (`hvdlite-run --live`) what it does.

Without a view nothing here starts a thread or imports anything. With one, `hvdlite.live.reporter`
writes to the pipe that the launcher has made.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from hvdlite import observed
from hvdlite.bootstrap.environment import host_name, live_pipe

if TYPE_CHECKING:
    from hvdlite.live.reporter import Reporter

_reporter: Reporter | None = None


def follow(engine: Any, rank: int, size: int, epoch: int = 0) -> None:
    """Report on this engine from now on, if a view of the job wants it.

    Args:
        engine: of the world that begins.
        rank: of this process in it.
        size: how many ranks it has.
        epoch: of an elastic job, the number of this world.
    """
    global _reporter
    pipe = live_pipe()
    if pipe is None:
        return
    if _reporter is None:
        from hvdlite.live.reporter import Reporter  # ordinary jobs do not need it

        _reporter = Reporter(pipe, host_name(), observed.figures)
        atexit.register(end)
    _reporter.follow(engine, rank, size, epoch)


def follow_unless_busy(engine: Any, rank: int, size: int) -> None:
    """Report on this engine if no engine is reported on: that of a process group, without `init`.

    Args:
        engine: of the group.
        rank: of this process in it.
        size: how many members it has.
    """
    if _reporter is None or not _reporter.busy:
        follow(engine, rank, size)


def end() -> None:
    """Write the last sample of the world that ends, if it is reported on; forget what it was told.

    What `hvd.observe` has counted belongs to the world, and goes on in the next epoch of an elastic
    job.
    """
    if _reporter is not None and live_pipe() is not None:
        _reporter.end()
    observed.forget()
