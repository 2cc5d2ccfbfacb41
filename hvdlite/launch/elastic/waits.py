"""For whom an elastic job waits: what the user is told every 10 seconds."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.launch.elastic.actions import Limits
from hvdlite.launch.elastic.roster import Phase, Stage, Worker, named

_WARN_SECONDS = 10.0


class Watch:
    """Says when to warn of a wait that goes on."""

    def __init__(self) -> None:
        self._wait = ""
        self.due_at: float | None = None

    def due(self, wait: str, now: float) -> bool:
        """Return whether to warn now of this wait; "" if there is none."""
        if wait == self._wait and (self.due_at is None or now < self.due_at):
            return False
        warn = wait == self._wait
        self._wait = wait
        self.due_at = now + _WARN_SECONDS if wait else None
        return warn


def describe_start(first: Sequence[Worker]) -> str:
    """Say which of the first workers are not ready."""
    late = [one for one in first if one.stage is not Stage.WAITING]
    return f"waits for {named(late)} to call hvd.init()" if late else ""


def describe_shortage(living: int, min_np: int) -> str:
    """Say that members and joiners are too few, and wait for others."""
    return f"{living} of at least {min_np} workers wait for others to join"


def given_up(limits: Limits, at_start: bool, living: int, wait: str) -> str:
    """Say why a job is given up: the first workers, or enough of the later ones, did not come."""
    if at_start:
        return (
            f"{limits.np} workers were not connected within --start-timeout "
            f"({limits.start_timeout:g} s): {wait}"
        )
    return (
        f"too few workers for --elastic-timeout ({limits.elastic_timeout:g} s): "
        f"{living} of at least {limits.min_np} (--min-np)"
    )


def describe(phase: Phase, epoch: int, members: Sequence[Worker]) -> str:
    """Say which members keep the others waiting; "" if none does."""
    if phase is Phase.FORMING:
        late = [one for one in members if not one.connected]
        return f"world {epoch} waits for {named(late)} to connect" if late else ""
    late = [one for one in members if not one.answered]
    if phase is Phase.GATHERING and late:
        coming = any(one.stage is Stage.COMING for one in late)
        what = "come to the boundary" if coming else "leave the epoch that has ended"
        return f"waits for {named(late)} to {what}"
    if phase is Phase.FORMED and 0 < len(late) < len(members):
        return f"a boundary waits for {named(late)}"
    return ""
