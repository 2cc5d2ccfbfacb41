"""Choose the failure that ended a job, and describe it; pure functions."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdlite.errors import in_library
from hvdlite.launch.output import last_states
from hvdlite.launch.process import Ending

# Seconds after the first failure in which another one may still turn out to be its cause.
CAUSE_WINDOW = 0.5
# The same if the first failure is only a consequence: the rank that caused it is still ending.
_CONSEQUENCE_WINDOW = 1.5
_Failure = TypeVar("_Failure", bound=Any)  # It has what `root_failure` reads.
_LINES = 20  # last lines of stderr that the report shows
_LINES_OF_TRACEBACK = 60  # the same where they contain the start of a traceback
_FRAME = re.compile(r'\s+File "([^"]+)", line \d+, in ')
_BY_TORCH = re.compile(rb"^\[rank\d+\]: ?", re.MULTILINE)  # before each line of a traceback
# Several ranks get these errors at once, and who ends first is chance.
_SHARED = (
    b"hvdlite.errors.DeadlockError",
    b"hvdlite.errors.MismatchError",
    b"hvdlite.errors.StalledError",
)
# A rank whose stderr has a line that begins like this failed because another rank did.
_CONSEQUENCES = (
    b"hvdlite.errors.RankFailedError",
    b"hvdlite.errors.CollectiveError",
    b"hvdlite.errors.CollectiveTimeoutError",
)


@dataclass(frozen=True)
class Failure:
    rank: int  # the rank, or the number of the worker
    pid: int
    ending: Ending
    at: float  # when the launcher noticed it, a monotonic time in seconds
    stderr: bytes  # the last bytes that the rank wrote to stderr
    host: str = ""

    @property
    def is_cause(self) -> bool:
        """Whether the failure is not just the consequence of another rank's failure."""
        return self.ending.by_signal or not self._wrote(_CONSEQUENCES)

    @property
    def is_shared(self) -> bool:
        return self._wrote(_SHARED)

    def _wrote(self, errors: tuple[bytes, ...]) -> bool:
        lines = _BY_TORCH.sub(b"", self.stderr).splitlines()
        return any(line.startswith(errors) for line in lines)

    @property
    def window(self) -> float:
        """The seconds in which another failure may still turn out to be the cause of this one."""
        return CAUSE_WINDOW if self.is_cause else _CONSEQUENCE_WINDOW


def root_failure(failures: Sequence[_Failure]) -> _Failure:
    """Choose the failure that caused the others: the first, if it is not just a consequence."""
    first = min(failures, key=lambda failure: failure.at)
    near = [failure for failure in failures if failure.at <= first.at + first.window]
    causes = [failure for failure in near if failure.is_cause]
    root = min(causes, key=lambda failure: failure.at) if causes else first
    # Of an error that several ranks got, the lowest rank tells: mostly rank 0 did something alone.
    shared = [failure for failure in near if failure.is_shared]
    return min(shared, key=lambda failure: failure.rank) if root in shared else root


def last_lines(stderr: bytes) -> list[str]:
    """Return the last lines of a rank's stderr, and more if a traceback begins before them."""
    lines = last_states(_BY_TORCH.sub(b"", stderr)).decode(errors="replace").splitlines()
    start = max(0, len(lines) - _LINES)
    for index in range(len(lines) - 1, max(-1, len(lines) - _LINES_OF_TRACEBACK), -1):
        if lines[index].startswith("Traceback (most recent call last)"):
            start = min(start, index)
            break
    return lines[start:]


def own_frames(lines: list[str]) -> list[str]:
    """Leave out frames of hvdlite and of installed libraries, if a traceback has others."""
    kept, skips = [], False
    for line in lines:
        frame = _FRAME.match(line)
        if frame:
            skips = in_library(frame[1])
        elif not line.startswith("    "):
            skips = False
        if not skips:
            kept.append(line)
    return kept if any(map(_FRAME.match, kept)) else lines


def verdict(failure: Failure) -> str:
    """Say that it failed first, unless that says nothing about the cause."""
    how = "ended by an error that several ranks got" if failure.is_shared else "failed first"
    return f"{how}: {failure.ending}"


_REMEDIES = {
    b"ModuleNotFoundError: No module named 'horovod'": (
        "a script for Horovod runs unchanged with `hvdlite-run --compat`: then `import horovod` "
        "finds hvdlite"
    ),
    b"ModuleNotFoundError: No module named 'hvdlite'": (
        "the Python that the command names has no hvdlite: install it there, or name the one of "
        f"hvdlite-run, {sys.executable}"
    ),
}


def describe(failure: Failure, noun: str = "rank") -> str:
    """Write the report of a failure, which the launcher shows last.

    `noun` says what the number of the failure counts: "rank", or "worker" in an elastic job.
    """
    who = f"{noun} {failure.rank} (host {failure.host}, pid {failure.pid})"
    text = [f"hvdlite-run: {who} {verdict(failure)}"]
    killed = failure.ending.by_signal and failure.ending.status == signal.SIGKILL
    if killed and not failure.ending.why:
        if failure.ending.oom_killed:
            text.append("hvdlite-run: the kernel's out-of-memory killer was at work here")
        else:
            text.append(
                "hvdlite-run: if nobody killed it, the out-of-memory killer may have: see `dmesg`"
            )
    for words, remedy in _REMEDIES.items():
        if words in failure.stderr:
            text.append(f"hvdlite-run: {remedy}")
    lines = last_lines(failure.stderr)
    if lines:
        own = own_frames(lines)
        which = "" if own == lines else ", without the frames of libraries"
        text.append(f"hvdlite-run: last lines of {noun} {failure.rank}'s stderr{which}:")
        text.extend(f"    {line}" for line in own)
    else:
        text.append(f"hvdlite-run: {noun} {failure.rank} wrote nothing to stderr")
    return "\n".join(text) + "\n"
