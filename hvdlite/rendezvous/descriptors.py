"""How many descriptors this process may open."""

from __future__ import annotations

import os
import resource

from hvdlite.errors import BootstrapError

_SPARE = 256  # for the script


def make_room(more: int, size: int) -> None:
    """Raise this process's own limit, if it needs that to open `more` descriptors."""
    # The limit stays as it is where it suffices, because programs that call select(2) rely on it.
    # Raises BootstrapError if the limit of the system is too low.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/proc/self/fd")) + more
    if soft == resource.RLIM_INFINITY or least + _SPARE <= soft:
        return
    most = hard if hard != resource.RLIM_INFINITY else least + _SPARE
    if most < least:
        raise BootstrapError(
            f"this rank needs {least} open files for its connections to the other ranks of {size}, "
            f"and may open {most}; raise the limit, for example by: ulimit -Hn {least + _SPARE}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(least + _SPARE, most), hard))
