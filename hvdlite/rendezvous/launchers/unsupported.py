"""Refuse to train alone when a variable says that this process is one of several.

Cluster software describes its processes by variables, from which hvdlite does not always learn a
rank. Each process would then make a world of one, and all of them would succeed: N models are
trained where one was wanted. So `refuse_to_be_alone` reads the variables that only processes with
others beside them have. HVDLITE_SIZE=1 insists on a world of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.launchers.variables import Variables

_SHOWN = 80  # characters of a value that the message shows
_AS_TORCHRUN = "give every process RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
_BY_HAND = "give every process HVDLITE_RANK, HVDLITE_SIZE, HVDLITE_RENDEZVOUS and HVDLITE_TOKEN"


def _number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        return 0


def _index(value: str) -> int:
    """Return how many processes there are at least, from the number of one of them, from 0."""
    return _number(value) + 1


def _most_nodes(value: str) -> int:
    """Read torchrun's number of nodes, which may be a range: "1:4"."""
    return _number(value.rpartition(":")[2])


def _length(value: str) -> int:
    try:
        hosts = json.loads(value)
    except ValueError:
        return 0
    return len(hosts) if isinstance(hosts, list) else 0


@dataclass(frozen=True)
class _Sign:
    """A variable that says how many processes there are."""

    name: str
    count: Callable[[str], int]  # returns, from its value, how many processes there are at least
    remedy: str = _BY_HAND  # what to do, so that hvdlite learns the ranks


# No other process has these variables with more than one: a batch script has SLURM_NTASKS=4 but
# SLURM_PROCID=0, and the first pod of an indexed Job cannot know of the others.
_SIGNS = (
    _Sign("HOROVOD_SIZE", _number, "start the script with hvdlite-run instead of horovodrun"),
    _Sign("WORLD_SIZE", _number, _AS_TORCHRUN),
    _Sign("OMPI_COMM_WORLD_SIZE", _number),
    _Sign("MV2_COMM_WORLD_SIZE", _number),
    _Sign("MVP_COMM_WORLD_SIZE", _number),
    _Sign("PMIX_RANK", _index),
    _Sign("SLURM_PROCID", _index),
    _Sign("PET_NNODES", _most_nodes, "start the script with `hvdlite-run --nodes auto`"),
    _Sign("SM_HOSTS", _length),
    _Sign("VC_TASK_INDEX", _index),
    _Sign(
        "JOB_COMPLETION_INDEX",
        _index,
        f"start the script with `hvdlite-run --nodes N --meet HOST:PORT`, or {_BY_HAND}",
    ),
)


# Ranks, and what is missing beside them: a rank alone is half of what a launcher says.
_RANKS = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}


def refuse_to_be_alone(variables: Variables) -> None:
    """Check that no variable says that this process, whose rank nobody has told, has others."""
    # Raises BootstrapError if one does; the message names it, and says what to set.
    for rank, size in _RANKS.items():
        if rank in variables and size not in variables:
            raise BootstrapError(
                f"{rank}={variables.get(rank)} is set, and {size} is not, so nobody knows how many "
                f"processes there are; {_AS_TORCHRUN}; if it is to train alone, set HVDLITE_SIZE=1"
            )
    for sign in _SIGNS:
        value = variables.get(sign.name)
        if value is None:
            continue
        count = sign.count(value)
        if count > 1:
            shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
            raise BootstrapError(
                f"{sign.name}={shown} says that this is one of at least {count} processes, but no "
                "variable tells hvdlite its rank, so every process would train alone; "
                f"{sign.remedy}; if it is to train alone, set HVDLITE_SIZE=1"
            )
