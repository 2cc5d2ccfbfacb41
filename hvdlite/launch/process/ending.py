"""How a rank ended: its exit status or signal, as a shell reports them."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from hvdlite.rendezvous.environment import EXIT_STOPPED


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    status: int  # the exit status, or the number of the signal that killed the process
    by_signal: bool  # whether a signal killed the process
    # If the launcher knows more than the status: what happened, such as a lost connection.
    why: str = ""
    oom_killed: bool = False  # whether the out-of-memory killer killed a process on its host

    @property
    def ok(self) -> bool:
        """Whether the rank has done all of its work."""
        return self.status == 0 and not self.by_signal

    @property
    def stopped(self) -> bool:
        """Whether the rank ended because it was asked to stop, and wants to be run again."""
        return self.status == EXIT_STOPPED and not self.by_signal

    @property
    def well(self) -> bool:
        """Whether the rank has not failed: it is done, or has stopped because it was asked to."""
        return self.ok or self.stopped

    @property
    def code(self) -> int:
        """The exit status that a shell would report: 128 + n for signal n."""
        return 128 + self.status if self.by_signal else self.status

    def __str__(self) -> str:
        """Describe the ending in words."""
        if self.why:
            return self.why
        if not self.by_signal:
            return f"exit status {self.status}"
        try:
            return f"killed by {signal.Signals(self.status).name}"
        except ValueError:
            return f"killed by signal {self.status}"
