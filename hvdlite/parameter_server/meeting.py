"""How workers find the servers: through the store of the job, where servers publish addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.parameter_server.client import Client, Link
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.dial import reach
from hvdlite.rendezvous.endpoint import Endpoint, host_identity
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import Job, Role
from hvdlite.rendezvous.store import PublisherGoneError, StoreClient


def _key(index: int) -> str:
    return f"parameter_server/{index}"


def publish(client: StoreClient, index: int, endpoint: Endpoint) -> None:
    """Tell workers where a server listens, for as long as the connection to the store lasts."""
    client.publish(_key(index), endpoint.description)


def reach_servers(worker: WorkerEnvironment, job: Job) -> Client:
    """Connect a worker to all servers, and wait for those that do not listen yet."""
    # The call raises BootstrapError if a server did not publish its address in time, cannot be
    # reached, or has ended.
    assert worker.rendezvous is not None
    deadline = Deadline(worker.start_timeout)
    links: list[Link] = []
    try:
        with StoreClient(worker.rendezvous, job, worker.rank, deadline) as client:
            for index in range(worker.servers):
                description = _look_up(client, index)
                address = _address(description, worker)
                name = f"parameter server {index}"
                number = worker.process
                connection, _ = reach(name, address, job, number, Role.PARAMETER, deadline)
                links.append(Link(connection, index, number))
    except BaseException:
        for link in links:
            link.close(goodbye=False)
        raise
    return Client(links)


def _look_up(client: StoreClient, index: int) -> Mapping[str, Any]:
    try:
        description: dict[str, Any] = client.look_up(_key(index))
    except PublisherGoneError:
        raise BootstrapError(
            f"parameter server {index} has ended, as servers do when no worker needs them any "
            "more: this worker has started too late, and nothing is left to train"
        ) from None
    return description


def _address(description: Mapping[str, Any], worker: WorkerEnvironment) -> str:
    here = description["host"] == host_identity(worker.host_id)
    return str(description["unix" if here else "tcp"])
