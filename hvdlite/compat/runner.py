"""`horovod.run`: `hvdlite.run` with Horovod's names for its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvdlite
from hvdlite.errors import ArgumentError

# Horovod's arguments, and hvdlite's names for those that have another one.
_NAMES = {
    **dict.fromkeys(("hosts", "hostfile", "output_filename", "start_timeout", "verbose")),
    **dict.fromkeys(("executable", "network_interfaces", "np", "ssh_identity_file", "ssh_port")),
    **dict.fromkeys(("host_discovery_script", "max_np", "min_np", "reset_limit")),
    "cooldown_range": "blacklist_cooldown_range",
    "max_num_proc": "max_np",
    "min_num_proc": "min_np",
    "network_interface": "network_interfaces",
    "slots": "slots_per_host",
}
# Arguments that change nothing here: hvdlite uses no MPI, and caches nothing about hosts.
_NEEDLESS = ("disable_cache", "use_gloo", "use_mpi", "mpi_args")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    **others: Any,
) -> list[Any]:
    """Call a function on every rank, as `hvdlite.run`; an unknown argument is an ArgumentError."""
    ours: dict[str, Any] = {"np": num_proc}
    for name, value in others.items():
        if name not in (*_NAMES, *_NEEDLESS):
            raise ArgumentError(f"horovod.run() has no argument {name!r}")
        if name in _NAMES and value is not None:
            ours[_NAMES[name] or name] = value
    interfaces = ours.pop("network_interfaces", ())
    names = interfaces.split(",") if isinstance(interfaces, str) else interfaces
    ours["network_interfaces"] = [name for name in names if name]
    ours["verbose"] = bool(ours.get("verbose"))
    return hvdlite.run(func, args, kwargs, **ours)
