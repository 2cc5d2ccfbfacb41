"""`horovod.run`: `hvdlite.run` with Horovod's names for its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hvdlite
from hvdlite.errors import ArgumentError

# Arguments of elastic jobs, and hvdlite's names for them.
_ELASTIC = {
    "min_num_proc": "min_np",
    "max_num_proc": "max_np",
    "min_np": "min_np",
    "max_np": "max_np",
    "slots": "slots_per_host",
    "reset_limit": "reset_limit",
    "cooldown_range": "blacklist_cooldown_range",
    "host_discovery_script": "host_discovery_script",
}
# Arguments that change nothing here: hvdlite uses no MPI, and caches nothing about hosts.
_NEEDLESS = ("disable_cache", "use_gloo", "use_mpi", "mpi_args")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | Path | None = None,
    output_filename: str | Path | None = None,
    verbose: int | bool | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call a function on every rank, as `hvdlite.run`; an unknown argument is an ArgumentError."""
    elastic = {}
    for name, value in others.items():
        if name in _ELASTIC and value is not None:
            elastic[_ELASTIC[name]] = value
        if name not in (*_ELASTIC, *_NEEDLESS):
            raise ArgumentError(f"horovod.run() has no argument {name!r}")
    interfaces = network_interfaces or network_interface or ()
    names = interfaces.split(",") if isinstance(interfaces, str) else interfaces
    return hvdlite.run(
        func,
        args,
        kwargs,
        np=num_proc if np is None else np,
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        verbose=bool(verbose),
        network_interfaces=[name for name in names if name],
        executable=executable,
        **elastic,
    )
