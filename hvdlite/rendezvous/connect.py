"""Connect this rank to all others, and return everything that the engine needs.

The ranks exchange their endpoints: in ordinary jobs through the store (`connect`), in elastic jobs
through the registrar, once for every epoch. Then they connect to each other directly
(`connect_members`). No process listens once the ranks of an ordinary job are connected; a worker of
an elastic job keeps its listeners for the next epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.rendezvous.connection import Connection, UnreachableError
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.endpoint import Endpoint
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.mesh import Mesh
from hvdlite.rendezvous.serving import serve_store
from hvdlite.rendezvous.store import StoreClient

__all__ = ["Connection", "Endpoint", "UnreachableError", "connect", "connect_members"]

_EPOCH_BYTES = 4


def connect(
    worker: WorkerEnvironment,
    create_segment: Callable[[int], int],
    agreed: Mapping[str, str] | None = None,
    deadline: Deadline | None = None,
) -> Connection:
    """Connect this rank to all others, which it meets through the store."""
    # `create_segment` makes the memory that this rank shares with the ranks of its host; takes
    # their number and returns a descriptor.
    # `deadline` limits the whole start, and another thread may give it up; by default it follows
    # from `worker.start_timeout`.
    # Raises BootstrapError if a rank did not arrive, was refused, or has other settings; the
    # message names the rank.
    # Raises GivenUpError if the deadline was given up.
    if worker.size == 1:
        return Connection()
    deadline = deadline or Deadline(worker.start_timeout)
    job = Job(worker.token, worker.job_id, worker.epoch)
    assert worker.rendezvous is not None
    with contextlib.ExitStack() as stack:
        address = worker.rendezvous
        if worker.serves_store:
            address = stack.enter_context(serve_store(worker, job, deadline)).address
        client = stack.enter_context(StoreClient(address, job, worker.rank, deadline))
        endpoint = stack.enter_context(Endpoint(worker, client.local_host, agreed or {}))
        members = client.exchange("addresses", endpoint.description)
        job = Job(worker.token, worker.job_id, _epoch_of(worker.epoch, members))

        def meet(clock: Any) -> list[Any]:
            return client.exchange(f"connected/{job.epoch}", clock)

        return connect_members(endpoint, worker.rank, members, job, create_segment, deadline, meet)


def connect_members(
    endpoint: Endpoint,
    rank: int,
    descriptions: Sequence[Mapping[str, Any]],
    job: Job,
    create_segment: Callable[[int], int],
    deadline: Deadline,
    meet: Callable[[Any], list[Any]],
    answer_seconds: float = 0.0,
) -> Connection:
    """Connect this rank to the ranks whose endpoints are given."""
    # `descriptions` has, by rank, the description of each member's endpoint, with this rank's own
    # one.
    # `deadline` limits everything but `meet`. When another thread gives it up, this function ends
    # within 50 ms, unless the process does not get the CPU.
    # `meet` is called with this rank's clock, as a JSON value, when this rank has all its
    # connections; waits until all ranks have theirs, and returns the clocks by rank.
    # `answer_seconds` says how long the kernel of another host may take to answer, however late the
    # member there is; 0 means until the deadline.
    # Raises UnreachableError if a member cannot be reached, or did not connect in time; `rank`
    # names it.
    # Raises BootstrapError if a member has other settings, or is not what its endpoint says.
    # Raises GivenUpError if the deadline was given up.
    mesh = Mesh(endpoint, rank, descriptions, job, create_segment, deadline, answer_seconds)
    return mesh.connect(meet)


def _epoch_of(epoch: int, members: Sequence[Any]) -> int:
    """Derive the epoch of the handshakes between ranks that met through the store."""
    # The addresses are fresh in every start. So their digest, as the epoch of the handshakes,
    # refuses processes that are left over from an earlier start or a failed one.
    digest = hashlib.sha256(json.dumps([epoch, members]).encode()).digest()
    return int.from_bytes(digest[:_EPOCH_BYTES], "little")
