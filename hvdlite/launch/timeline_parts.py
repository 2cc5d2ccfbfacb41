"""The folder for the parts of a job's timeline, which the launcher merges when the job is over."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hvdlite.errors import ArgumentError
from hvdlite.launch.console import Console
from hvdlite.timeline import recorder


class TimelineParts:
    """The parts of the timeline that the ranks of this host write."""

    def __init__(self, job_id: bytes) -> None:
        """Choose the folder; the ranks create it."""
        # There is none if no temporary folder can be written. The ranks then put the parts beside
        # the timeline, and the parts that they cannot merge stay there.
        self._folder: Path | None = None
        try:
            self._folder = Path(tempfile.gettempdir()) / f"hvdlite-timeline-{job_id.hex()}"
        except FileNotFoundError:
            pass

    @property
    def environment(self) -> dict[str, str]:
        """The variable that tells a rank the folder."""
        return {} if self._folder is None else {"HVDLITE_TIMELINE_PARTS": str(self._folder)}

    def recorder(self, console: Console) -> None:
        """Merge the parts that the ranks could not merge, for example because one was killed."""
        if self._folder is None:
            return
        try:
            recorder.merge_leftovers(self._folder)
        except (OSError, ArgumentError) as error:
            console.say(f"no timeline: {error}; its parts are in {self._folder}")
