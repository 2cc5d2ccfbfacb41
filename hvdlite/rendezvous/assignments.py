"""Make the launcher environments of ranks that a program starts, as hvdlite does on Ray.

Such a program starts functions, not programs, so it cannot describe the ranks by environment
variables. It learns where each rank runs, has rank 0's process start the store, and sends each rank
its assignment: what `detect` would otherwise read from the variables of a launcher. Each rank
passes its assignment to `environment.assign_rank`. The program draws a fresh secret and sends it by
its own means, because nobody else may read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hvdlite.errors import ArgumentError
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import EPOCHS, JOB_ID_BYTES, TOKEN_BYTES, Job
from hvdlite.rendezvous.store import Store


class Place(NamedTuple):
    """Where one rank runs."""

    node: str  # a name that ranks have in common if they share a host and its network namespace
    address: str  # the IP address, or the name, at which the other hosts reach this one


def start_store(places: Sequence[Place], job: Job) -> Store:
    """Serve the store of a job, in rank 0's process; its `address` belongs in the assignments.

    The store listens at the address of rank 0's host; if all ranks share a host, at a Unix socket.
    The caller closes it when every rank has connected.

    Raises:
        OSError: the kernel refuses to listen at the address of rank 0.
        ArgumentError: `job` cannot be used, or there is no place.
    """
    _check(places, job)
    address = None
    if len({place.node for place in places}) > 1:
        address = f"{places[0].address}:0"
    return Store.start(len(places), job, address)


def assignments(
    places: Sequence[Place], store: str, job: Job, **settings: Any
) -> list[WorkerEnvironment]:
    """Return the assignments of all ranks, with these settings; see `assignment_for`."""
    _check(places, job)
    given = [assignment_for(places, rank, store, job) for rank in range(len(places))]
    return [replace(one, **settings) for one in given]


def assignment_for(places: Sequence[Place], rank: int, store: str, job: Job) -> WorkerEnvironment:
    """Return the assignment of one rank.

    The local rank is the number of earlier ranks of the same node, and nodes are numbered in order
    of first appearance. `places` has, by rank, where it runs, and is the same on all ranks. Ranks
    of different epochs refuse each other.

    Raises:
        ArgumentError: `rank` or `job` cannot be used.
    """
    _check(places, job)
    if not 0 <= rank < len(places):
        raise ArgumentError(
            f"rank {rank} has no assignment: there are places for {len(places)} ranks"
        )
    nodes = [place.node for place in places]
    own = nodes[rank]
    return WorkerEnvironment(
        rank=rank,
        size=len(places),
        local_rank=nodes[:rank].count(own),
        local_size=nodes.count(own),
        node=list(dict.fromkeys(nodes)).index(own),
        rendezvous=store,
        token=job.token,
        job_id=job.job_id,
        epoch=job.epoch,
        launcher="a program",
    )


def _check(places: Sequence[Place], job: Job) -> None:
    if not places:
        raise ArgumentError("a job needs a place for at least one rank; `places` is empty")
    if len(job.token) != TOKEN_BYTES or len(job.job_id) != JOB_ID_BYTES:
        raise ArgumentError(
            f"a job needs a token of {TOKEN_BYTES} and a job id of {JOB_ID_BYTES} random bytes; "
            f"these have {len(job.token)} and {len(job.job_id)}"
        )
    if job.epoch not in EPOCHS:
        raise ArgumentError(
            f"epoch {job.epoch} cannot be used: give a number from 0 to {EPOCHS[-1]}"
        )
