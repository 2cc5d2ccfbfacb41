"""Which processes of a rank get the signal that asks the rank to stop.

Usually all of them do. But a process that called `hvd.stop_on()` wants to finish its step and to
save. Its children, such as the workers of a DataLoader, would end at the signal, and the step would
fail; its parents, such as a shell, would end, and the rank would count as killed. So these do not
get the signal. A process that watches has an open memfd whose name tells the signal and the
process, because children inherit descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from hvdlite.launch.process.orphan_reaper import signal_group, signal_processes
from hvdlite.stop_marks import watch_name


def ask_group(group: int, number: int) -> None:
    """Send a signal to a rank's process group, or to those of it that are to be told."""
    parents = _members(group)
    watching = {pid for pid in parents if _watches(pid, number)}
    if watching:
        signal_processes(signalled(parents, watching), number)
    else:
        signal_group(group, number)


def signalled(parents: Mapping[int, int], watching: Collection[int]) -> list[int]:
    """List those that watch, and those that are neither above nor below one of these."""
    # Of two that watch, one below the other, the upper one is told.
    above = {one for pid in watching for one in _ancestors(pid, parents)}.difference(watching)
    return [
        pid
        for pid in parents
        if pid not in above and not any(one in watching for one in _ancestors(pid, parents))
    ]


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    pid = parents[pid]
    while pid in parents:
        yield pid
        pid = parents[pid]


def _members(group: int) -> dict[int, int]:
    members: dict[int, int] = {}
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getpgid(int(name)) == group:
                members[int(name)] = _parent(name)
        except OSError:
            continue  # The process has ended.
    return members


def _parent(name: str) -> int:
    with open(f"/proc/{name}/stat", "rb") as stat:
        # The name of the program, in parentheses, may have any character.
        return int(stat.read().rpartition(b")")[2].split()[1])


def _watches(pid: int, number: int) -> bool:
    wanted = Path(f"/memfd:{watch_name(number, pid)} (deleted)")
    try:
        return any(_target(fd) == wanted for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False  # The process has ended, or belongs to another user.


def _target(fd: Path) -> Path | None:
    try:
        return fd.readlink()
    except OSError:
        return None  # It was closed meanwhile.
