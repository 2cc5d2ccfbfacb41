"""Find processes that are stopped: in state T of /proc, as after SIGSTOP.

Such a process answers nobody, and its connections stay open. A traced process (state t) is not
meant: a debugger has it.
"""

from __future__ import annotations

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
    """Notes since when each worker is stopped, from looks at a regular period.

    Example:
        >>> watch = StoppedWatch(heartbeat=3.0)
        >>> [watch.look(7, "T", now) for now in (10.0, 11.0, 12.0, 13.0)]
        [False, False, False, True]
    """

    def __init__(self, heartbeat: float) -> None:
        """Make a watch that finds workers that are stopped for `heartbeat` seconds."""
        self.period = heartbeat / 4
        self._heartbeat = heartbeat
        self._since: dict[int, float] = {}
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Begin to look at all workers; forget all if this process was stopped itself."""
        if now - self._last > self._heartbeat:
            self._since.clear()
        self._last = now

    def look(self, worker: int, state: str, now: float) -> bool:
        """Take a worker's state; return whether it has been stopped for the heartbeat."""
        if state != _STOPPED:
            self._since.pop(worker, None)
            return False
        return now - self._since.setdefault(worker, now) >= self._heartbeat

    def forget(self, worker: int) -> None:
        """Forget a worker that has ended."""
        self._since.pop(worker, None)
