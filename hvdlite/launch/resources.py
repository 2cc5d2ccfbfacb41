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
    cores = len(os.sched_getaffinity(0))
    try:
        quota = quota_cores(_CGROUPS, Path("/proc/self/cgroup").read_text())
    except OSError:
        quota = None
    return cores if quota is None else min(cores, quota)


def quota_cores(cgroups: Path, membership: str) -> int | None:
    """Count the whole cores that the strictest quota leaves, at least 1; None without a quota."""
    # The core counts in the same way (csrc/base/cpu.cc), but --doctor needs the number even where
    # the core does not load.
    quotas = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (cgroups, cgroups / "cpu", cgroups / controllers):
            own = mount / path.lstrip("/")
            # In a container the path may be one of the host: then only the mount itself exists.
            above = [folder for folder in own.parents if folder.is_relative_to(mount)]
            quotas += [quota for folder in (own, *above) if (quota := _quota_of(folder))]
    return max(1, int(min(quotas))) if quotas else None


def _quota_of(folder: Path) -> float | None:
    """Read one cgroup's quota, in cores; version 2 has one file for it, version 1 has two."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None


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
