"""How long tests wait, and how they judge a bound on a machine that is busy with something else.

A test waits for a state (`wait_until`), and gives up after HANG, which only a hang reaches. A bound
that the pages promise holds on a machine with a free core: `Stopwatch` counts only the time in
which no process of the machine waited for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

HANG = 60.0  # seconds; a crowded machine stays far below, and what would go wrong must take longer
_PRESSURE = Path("/proc/pressure/cpu")


def wait_until(true: Callable[[], object], what: str, seconds: float = HANG) -> None:
    """Look until something is true.

    Raises:
        AssertionError: it is not true after these seconds; the message says what was waited for.
    """
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for: {what}"
        time.sleep(0.01)


class Stopwatch:
    """Counts seconds, without those in which some process of this machine waited for a core.

    A kernel that does not count these (it has no /proc/pressure/cpu) makes every bound hold: there
    a test finds only hangs.

    Example:
        watch = Stopwatch()
        job.signal(signal.SIGINT)
        job.finish()
        assert watch.seconds() <= 2.0
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._stalled = _stalled_seconds()

    def seconds(self) -> float:
        if self._stalled is None:
            return 0.0
        stalled = (_stalled_seconds() or 0.0) - self._stalled
        return max(0.0, time.monotonic() - self._begun - stalled)


def _stalled_seconds() -> float | None:
    """Return for how long since the machine's start some process has waited for a core."""
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:
        return None
    return int(some.rpartition("=")[2]) / 1e6
