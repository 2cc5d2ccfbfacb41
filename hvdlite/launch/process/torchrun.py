"""The variables by which torch.distributed, and the trainers above it, find the other ranks.

Accelerate, transformers, Lightning and ignite read what torchrun sets. Without these variables they
take a rank of several for the only process, and train alone. Elastic jobs and jobs with parameter
servers have no such variables: their ranks change, and torch.distributed's do not.

RANK and its like are set in any case, since one value for all ranks cannot be right. MASTER_ADDR
and MASTER_PORT are the user's, if both are there.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hvdlite.launch.process.placement import Placement

# Where hvdlite-run chose the address: the ranks then meet by hvdlite's store (`hvdlite_autoload`).
_OURS = "HVDLITE_TORCH_MASTER"
_FIRST_PORT, _PORTS = 20000, 10000  # below the range from which the kernel chooses


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a user's variables without those that an outer hvdlite-run has set for torch."""
    if _OURS not in environment:
        return dict(environment)
    theirs = {*_numbers(Placement(0, 1, 0, 1, 0, 1, 0), b""), "MASTER_ADDR", "MASTER_PORT", _OURS}
    return {name: value for name, value in environment.items() if name not in theirs}


def torch_master(
    environment: Mapping[str, str], host: str, here: bool, job_id: bytes
) -> dict[str, str]:
    """Choose where rank 0 is to serve torch.distributed's store; return it as variables."""
    # `host` is the address of rank 0's host, for the other ranks.
    # `here` says whether that is this host, whose free ports are known.
    names = ("MASTER_ADDR", "MASTER_PORT")
    if all(environment.get(name) for name in names):
        return {name: environment[name] for name in names}
    drawn = int.from_bytes(job_id[:4], "little")
    ports = [_FIRST_PORT + (drawn + step) % _PORTS for step in range(_PORTS)]
    port = next((port for port in ports if not here or _is_free(host, port)), ports[0])
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), _OURS: f"{host}:{port}"}


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True


def torchrun_environment(
    placement: Placement, master: Mapping[str, str], job_id: bytes
) -> dict[str, str]:
    """Build torchrun's variables for one rank."""
    return {**_numbers(placement, job_id), **master}


def _numbers(placement: Placement, job_id: bytes) -> dict[str, str]:
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "GROUP_RANK": str(placement.host),
        "TORCHELASTIC_RUN_ID": f"hvdlite-{job_id.hex()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
