"""The flags of jobs with parameter servers."""

from __future__ import annotations

import argparse

from hvdlite.errors import ArgumentError
from hvdlite.launch.description import Servers

_BELONG = {"min_workers": "--min-workers", "worker_restarts": "--worker-restarts"}
# What a job with servers cannot have besides, by the name in the options.
_WITHOUT = {
    "min_np": "--min-np (write --min-workers)",
    "max_np": "--max-np",
    "host_discovery_script": "--host-discovery-script",
    "emit": "--emit",
}


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Refuse flags that contradict --servers, or that need it."""
    # Raises ArgumentError if there are such flags.
    if options.servers is None:
        for dest, flag in _BELONG.items():
            if getattr(options, dest) is not None:
                raise ArgumentError(f"{flag} belongs to --servers, which is not given")
        return
    for dest, flag in _WITHOUT.items():
        if getattr(options, dest) is not None:
            raise ArgumentError(f"--servers and {flag}: a job has one of them")


def describe_servers(options: argparse.Namespace) -> Servers | None:
    """Turn the flags into the description of the servers; None for a job without."""
    if options.servers is None:
        return None
    standard = Servers(options.servers)
    least, restarts = options.min_workers, options.worker_restarts
    return Servers(
        options.servers,
        standard.min_workers if least is None else least,
        standard.restarts if restarts is None else restarts,
    )
