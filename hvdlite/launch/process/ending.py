"""How a rank ended, in the terms of a shell."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit status, or the signal that killed it.

    Attributes:
        why: what happened, where it was not the process that ended but the way to its host.
        oom_killed: the out-of-memory killer was at work on its host.
    """

    status: int
    by_signal: bool
    why: str = ""
    oom_killed: bool = False

    @property
    def ok(self) -> bool:
        """Say whether it ended well."""
        return self.status == 0 and not self.by_signal

    @property
    def code(self) -> int:
        """Give the exit status that a shell would: 128 + n for signal n."""
        return 128 + self.status if self.by_signal else self.status

    def __str__(self) -> str:
        """Put it in words."""
        if self.why:
            return self.why
        if not self.by_signal:
            return f"exit status {self.status}"
        try:
            return f"killed by {signal.Signals(self.status).name}"
        except ValueError:
            return f"killed by signal {self.status}"
