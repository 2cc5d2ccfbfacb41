"""Find processes that are stopped: in state T of /proc, as after SIGSTOP.

Such a process answers nobody, and its connections stay open. A traced process (state t) is not
meant: a debugger has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

_STOPPED = "T"


def process_state(pid: int) -> str:
    """Return the letter of a process's state; "" if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # The name before it may contain anything.


class StoppedWatch:
    """Notes since when each worker is stopped, from looks at a regular period."""

    def __init__(self, heartbeat: float, state_of: Callable[[int], str] = process_state) -> None:
        """Make a watch that finds workers that are stopped for `heartbeat` seconds."""
        self.due = 0.0  # when the next look is due, a monotonic time in seconds
        self._heartbeat = heartbeat
        self._state_of = state_of
        self._since: dict[int, float] = {}
        self._last = 0.0

    def find(self, pids: Mapping[int, int], now: float) -> list[int]:
        """Look at the running workers, if a look is due."""
        # Returns the workers that have been stopped for the heartbeat; each is returned once.
        if now < self.due:
            return []
        self.due = now + self._heartbeat / 4
        stopped = {number for number, pid in pids.items() if self._state_of(pid) == _STOPPED}
        if now - self._last > self._heartbeat:
            self._since.clear()  # This process was stopped itself, and so knows nothing.
        self._last = now
        self._since = {number: self._since.get(number, now) for number in stopped}
        found = [n for n, since in self._since.items() if since <= now - self._heartbeat]
        self._since.update(dict.fromkeys(found, math.inf))
        return found
