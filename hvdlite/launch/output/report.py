"""Choose the failure that ended a job, and put it in words; pure.

Example:
    >>> from hvdlite.launch.process.ending import Ending
    >>> ranks = [
    ...     Failure(0, 11, Ending(1, False), 5.00, b"hvdlite.errors.RankFailedError: rank 2 ..."),
    ...     Failure(2, 13, Ending(3, False), 5.02, b"ValueError: boom"),
    ... ]
    >>> root_failure(ranks).rank
    2
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.launch.process.ending import Ending

# How long after the first failure another one may still be the cause of it.
CAUSE_WINDOW = 0.5
# The same where the first failure only tells of another rank's: that one is still on its way out.
_PATIENCE = 1.5
_LINES = 20
_LINES_OF_TRACEBACK = 60
# A rank whose last words are these did not start it: another rank did.
_CONSEQUENCES = (
    b"hvdlite.errors.RankFailedError",
    b"hvdlite.errors.CollectiveError",
    b"hvdlite.errors.CollectiveTimeoutError",
)


@dataclass(frozen=True)
class Failure:
    """One rank's end that was not a good one; `at` is a monotonic time, `stderr` its last bytes."""

    rank: int
    pid: int
    ending: Ending
    at: float
    stderr: bytes

    @property
    def is_cause(self) -> bool:
        """Say whether it is more than the consequence of another rank's failure."""
        return self.ending.by_signal or not is_consequence(self.stderr)

    @property
    def window(self) -> float:
        """Say for how many seconds another failure may still turn out to be the cause of it."""
        return CAUSE_WINDOW if self.is_cause else _PATIENCE


def is_consequence(stderr: bytes) -> bool:
    """Say whether a rank's traceback tells of another rank's failure."""
    return any(line.startswith(_CONSEQUENCES) for line in stderr.splitlines())


def root_failure(failures: Sequence[Failure]) -> Failure:
    """Pick the failure that the others followed from: the first that is no consequence."""
    first = min(failures, key=lambda failure: failure.at)
    near = [failure for failure in failures if failure.at <= first.at + first.window]
    causes = [failure for failure in near if failure.is_cause]
    return min(causes, key=lambda failure: failure.at) if causes else first


def last_lines(stderr: bytes) -> list[str]:
    """Take the last lines of a rank's stderr, more of them to show a traceback from its start."""
    lines = stderr.decode(errors="replace").splitlines()
    start = max(0, len(lines) - _LINES)
    for index in range(len(lines) - 1, max(-1, len(lines) - _LINES_OF_TRACEBACK), -1):
        if lines[index].startswith("Traceback (most recent call last)"):
            start = min(start, index)
            break
    return lines[start:]


def describe(failure: Failure, host: str, oom_killed: bool) -> str:
    """Write the report that is shown last."""
    who = f"rank {failure.rank} (host {host}, pid {failure.pid})"
    text = [f"hvdlite-run: {who} failed first: {failure.ending}"]
    if failure.ending.by_signal and failure.ending.status == signal.SIGKILL:
        if oom_killed:
            text.append("hvdlite-run: the kernel's out-of-memory killer was at work here")
        else:
            text.append(
                "hvdlite-run: if nobody killed it, the out-of-memory killer may have: see `dmesg`"
            )
    lines = last_lines(failure.stderr)
    if lines:
        text.append(f"hvdlite-run: last lines of rank {failure.rank}'s stderr:")
        text.extend(f"    {line}" for line in lines)
    else:
        text.append(f"hvdlite-run: rank {failure.rank} wrote nothing to stderr")
    return "\n".join(text) + "\n"
