"""What shows a running job to people: the screen and the report; each is a `Viewer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvdlite.live.run import Run


@dataclass(frozen=True)
class About:
    """What the launcher knows of a job from its start."""

    command: tuple[str, ...]  # Every rank runs this program with these arguments.
    ranks: int  # There are so many at the start.
    hosts: tuple[str, ...]  # Each host of the start is here once.
    began: float  # The job was started at this time, in seconds since 1970.

    @property
    def program(self) -> str:
        """The name of the script or program, for headings."""
        words = [word.rpartition("/")[2] for word in self.command]
        scripts = [word for word in words if word.endswith(".py")]
        modules = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "-m"]
        return (scripts or modules or words or ["?"])[0]


@dataclass(frozen=True)
class End:
    """How a job has ended."""

    status: int  # The launcher ends with this exit status.
    why: str  # It tells the first failure in words; it is empty if there was none.


class Viewer(Protocol):
    """Shows a job. If it raises, the launcher prints a line, and the job goes on without it."""

    # The launcher's thread calls both methods once, and the ranks wait for both. A viewer that has
    # to do something in between has a thread of its own, which only reads the run.

    def start(self, run: Run, about: About) -> None:
        """Begin to show a job; called before its ranks start."""

    def stop(self, end: End) -> None:
        """End; called when the ranks have ended and the launcher has shown why."""
