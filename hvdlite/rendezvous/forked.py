"""Keep what belongs to this process out of its forked children.

A forked child inherits every descriptor. A connection then stays open, and a listener goes on
taking peers in, after the process that they belong to has died: the peers wait for a dead rank. So
the children close what is registered here. (The core does the same for its own descriptors.)
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something with descriptors that a forked child must not keep."""

    def close_in_child(self) -> None:
        """Close the child's copies; called in the child, where no other thread exists."""


_owners: weakref.WeakSet[Inherited] = weakref.WeakSet()


def leave_to_parent(owner: Inherited) -> None:
    """Have each child that this process forks from now on call `owner.close_in_child()`."""
    _owners.add(owner)


def forget(owner: Inherited) -> None:
    """End the effect of `leave_to_parent`; the descriptors of `owner` have another owner now."""
    _owners.discard(owner)


def _close_all() -> None:
    for owner in list(_owners):
        owner.close_in_child()
    _owners.clear()


os.register_at_fork(after_in_child=_close_all)
