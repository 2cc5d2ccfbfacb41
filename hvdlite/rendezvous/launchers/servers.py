"""What the variables of a process say of parameter servers, which are the first ranks of a job.

hvdlite-run sets HVDLITE_SERVERS, HVDLITE_WORKER and HVDLITE_JOINER. Under other launchers users set
HVDLITE_SERVERS in every process, except under TF_CONFIG, which names its servers itself.
"""

from __future__ import annotations

from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.launchers.variables import Variables


def service_numbers(variables: Variables, rank: int, size: int, named: int = 0) -> dict[str, Any]:
    """Return the fields of a `WorkerEnvironment` that concern parameter servers."""
    # `named` says how many servers the launcher itself names, if the variables do not.
    # Raises BootstrapError if no rank is left for workers, or a variable is not a number.
    servers = variables.number("HVDLITE_SERVERS", named)
    if servers == 0:
        return {}
    if servers >= size:
        raise BootstrapError(
            f"HVDLITE_SERVERS={servers} leaves none of the {size} ranks to train; give fewer "
            "servers, or start more ranks"
        )
    return {
        "servers": servers,
        "process": variables.number("HVDLITE_WORKER", rank),
        "joiner": variables.flag("HVDLITE_JOINER"),
    }


def refuse_other_kind(servers: int, rank: int, with_servers: bool) -> None:
    """Refuse a script that asks for another kind of job than the launcher has started."""
    # `with_servers` says whether the script asks for parameter servers.
    # Raises BootstrapError if it does not get what it asks for.
    if servers and not with_servers:
        kind = "server" if rank < servers else "worker"
        raise BootstrapError(
            f"rank {rank} is a {kind} of a job with parameter servers, which has no world of "
            "ranks: call hvd.parameter_server.connect() instead of hvd.init(), or start the "
            "script without servers"
        )
    if with_servers and not servers:
        raise BootstrapError(
            "this job has no parameter servers; start it with hvdlite-run --servers N, or set "
            "HVDLITE_SERVERS=N in every process under another launcher"
        )
