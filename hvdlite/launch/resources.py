"""What this machine lets the job use: cores, memory, and whether the kernel ran out of it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def _own_cgroup() -> Path:
    """Find this process's folder in the unified cgroup tree (the root when that is unknown)."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                return _CGROUPS / path.lstrip("/")
    except (OSError, ValueError):
        pass
    return _CGROUPS


def _cgroup_text(name: str) -> str:
    """Read one file of the own cgroup; "" where it does not exist."""
    for folder in (_own_cgroup(), _CGROUPS):
        try:
            return (folder / name).read_text()
        except OSError:
            continue
    return ""


def available_cores() -> int:
    """Count the cores that this process may use: its affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _cgroup_text("cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """Say how much memory this process may use: the machine's, or a container's limit."""
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
