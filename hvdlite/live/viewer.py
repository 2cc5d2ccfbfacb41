"""What shows a running job to people: the screen, the page, the report; each is a `Viewer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvdlite.live.run import Run


@dataclass(frozen=True)
class About:
    """What the launcher knows of a job from its start.

    Attributes:
        command: the program of every rank, and its arguments.
        ranks: how many there are at the start.
        hosts: the names of the hosts at the start, each one once.
        began: when the job was started, in seconds since 1970.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[str, ...]
    began: float

    @property
    def program(self) -> str:
        """The name of the script or program, for headings.

        Example:
            >>> About(("/usr/bin/python3", "-u", "a/train.py", "--lr", "1"), 2, ("h",), 0.0).program
            'train.py'
        """
        words = [word.rpartition("/")[2] for word in self.command]
        scripts = [word for word in words if word.endswith(".py")]
        modules = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "-m"]
        return (scripts or modules or words or ["?"])[0]


@dataclass(frozen=True)
class End:
    """How a job has ended.

    Attributes:
        status: the exit status of the launcher.
        why: the first failure, in words; empty if there was none.
    """

    status: int
    why: str


class Viewer(Protocol):
    """Shows a job. What it raises becomes a line of the launcher, and the job goes on without it.

    The launcher's thread calls both methods once, and the ranks wait for both. A viewer that has to
    do something in between has a thread of its own, which only reads the run.
    """

    def start(self, run: Run, about: About) -> None:
        """Begin to show a job; called before its ranks start."""

    def stop(self, end: End) -> None:
        """End; called when the ranks have ended and the launcher has shown why."""
