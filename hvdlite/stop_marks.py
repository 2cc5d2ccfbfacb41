"""By what a rank and its launcher know that the rank was asked to stop."""

from __future__ import annotations

EXIT_STOPPED = 75
"""The exit status of a rank that was asked to stop, has saved, and wants to be run again.

It is EX_TEMPFAIL of sysexits.h.
"""


def watch_name(number: int, pid: int) -> str:
    """Return the name of the memfd of a process that watches for a signal."""
    return f"hvdlite-stop-{number}-{pid}"
