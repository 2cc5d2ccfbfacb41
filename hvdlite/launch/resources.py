"""The cores and the memory that this process may use, and the kills of the out-of-memory killer."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def _own_cgroup() -> Path:
    """Find this process's folder in the unified cgroup tree; the root if it is unknown."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                return _CGROUPS / path.lstrip("/")
    except (OSError, ValueError):
        pass
    return _CGROUPS


def _cgroup_text(name: str) -> str:
    """Read one file of this process's cgroup; "" if there is no such file."""
    for folder in (_own_cgroup(), _CGROUPS):
        try:
            return (folder / name).read_text()
        except OSError:
            continue
    return ""


def available_cores() -> int:
    """Count the cores that this process may use: its affinity, and a container's quota."""
    try:
        from hvdlite import _core
    except ImportError:  # No rank will run, and --doctor says why.
        return len(os.sched_getaffinity(0))
    return _core.available_cores()


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use: all, or the limit of its cgroup."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_text("memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def oom_kills() -> int:
    """Count the processes of this cgroup that the kernel killed for lack of memory so far."""
    for line in _cgroup_text("memory.events").splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return 0
