"""This process's membership in an elastic job, as `hvdlite.elastic.run` uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_MOST_SHOWN = 200  # The line about an epoch shows so many characters of an error.


@dataclass(frozen=True)
class Decision:
    """What a rank does after a boundary; all ranks get the same `sync` and `changed`."""

    leave: bool  # This rank ends here, without an error.
    sync: bool  # The ranks receive the state of rank 0.
    changed: bool  # The world is a new one.


class Membership(Protocol):
    """The side of the membership thread that the training function meets."""

    def enter(self, restored: bool) -> Decision:
        """Wait at the boundary until a world has been formed."""
        # `restored` says that a HorovodInternalError led this rank here.

    def first_joins(self) -> bool:
        """Return whether this rank joined a job that was running already."""


_membership: Membership | None = None
_received = False  # It is set when this process has received the state of the training.
_error = ""  # For this reason the rank has restored its state the last time.


def current_membership() -> Membership | None:
    """Return the membership of this process; None outside elastic jobs."""
    return _membership


def install_membership(one: Membership | None) -> None:
    """Set the membership of this process, or remove it."""
    global _membership, _received
    _membership, _received = one, False


def has_state() -> bool:
    """Return whether this rank has the state of the training: it began with it, or received it."""
    return _received or _membership is None or not _membership.first_joins()


def note_state() -> None:
    """Note that this rank has the state of the training from now on."""
    global _received
    _received = True


def note_error(error: BaseException) -> None:
    """Note the error for which this rank restores its state."""
    global _error
    lines = str(error).splitlines()
    _error = f"{type(error).__name__}: {lines[0][:_MOST_SHOWN]}" if lines else type(error).__name__


def last_error() -> str:
    """Return, in one line, the error that `note_error` was given last."""
    return _error
