"""How many descriptors this process may open, and which its forked children must not keep."""

from __future__ import annotations

import errno
import os
import resource
import sys
import weakref
from typing import Protocol

from hvdlite.errors import BootstrapError

_SPARE = 256  # for the script
_FILES_OF_PROCESS = 16  # at most: its pipes, the files of its output, what tells of its end


def raise_limit(wanted: int) -> int:
    """Raise this process's own limit towards `wanted` open files; return what it is now."""
    # The limit stays as it is where it suffices, because programs that call select(2) rely on it.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def explained(error: Exception) -> str:
    """Describe an error, and say what to do if the files that may be open are too few."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"{error.strerror}: this process may open {raise_limit(0)}; raise the limit, for "
            "example by `ulimit -n 4096`, or start fewer ranks on this host"
        )
    return str(error)


def room_for_processes(count: int) -> None:
    """Raise the limit, if a launcher of so many processes needs that to read their output."""
    raise_limit(_SPARE + _FILES_OF_PROCESS * count)


def make_room(more: int, size: int) -> None:
    """Raise this process's own limit, if it needs that to open `more` descriptors."""
    least = len(os.listdir("/proc/self/fd")) + more
    most = raise_limit(least + _SPARE)
    if most < least:
        raise BootstrapError(
            f"this rank needs {least} open files for its connections to the other ranks of {size}, "
            f"and may open {most}; raise the limit, for example by: ulimit -Hn {least + _SPARE}"
        )


# A forked child inherits every descriptor. A connection then stays open, and a listener goes on
# taking peers in, after the process that they belong to has died: the peers wait for a dead rank.
# So the children close what is registered here. (The core does the same for its own descriptors.)


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
