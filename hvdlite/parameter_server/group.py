"""What `connect` returns: this process as a server or as a worker, without a framework.

Adapters derive from `Group`, and add what knows tensors: `serve` and `replica`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from os import PathLike, fspath
from typing import Any, TypeVar

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.live import observed
from hvdlite.parameter_server.checkpoint import Saving
from hvdlite.parameter_server.client import Client, Link
from hvdlite.parameter_server.collection import Report, ServerReport
from hvdlite.parameter_server.server import Server
from hvdlite.parameter_server.tensors import MakeStorage
from hvdlite.rendezvous.client import reach
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import Job, Role
from hvdlite.rendezvous.mesh import Endpoint, host_identity
from hvdlite.rendezvous.store import PublisherGoneError, StoreClient, serve_store

_Self = TypeVar("_Self", bound="Group")


class Group:
    """The servers and workers of a job, as one of them sees them; a context manager.

    Attributes:
        serves: whether this process is a server.
        index: the number of this server, or of this worker, counted from 0; a worker that takes
            the place of one that died has a number of its own.
        servers: the number of servers.
    """

    def __init__(self, environment: WorkerEnvironment) -> None:
        """Connect a worker to all servers, or raise BootstrapError if that is not done in time.

        A server is reached when it serves.
        """
        self._environment = environment
        self._open = contextlib.ExitStack()
        self._job = Job(environment.token, environment.job_id, environment.epoch)
        self.servers = environment.servers
        self.serves = environment.rank < environment.servers
        self.index = environment.rank if self.serves else environment.process - environment.servers
        self.knows_workers = False
        self._client: Client | None = None
        self._store: StoreClient | None = None
        try:
            if self.serves:
                self._store = self._reach_store()
            else:
                self._client = _reach_servers(environment, self._job)
                self._show(Watched())
        except BaseException:
            self._open.close()
            raise

    @property
    def workers(self) -> int:
        """The number of workers that the job begins with; the rate is divided by it."""
        self.knows_workers = True
        return self._environment.size - self._environment.servers

    @property
    def client(self) -> Client:
        """The connections of this worker; ArgumentError in a server, and after `close`."""
        if self._client is None:
            why = "is a server: call group.serve(...)" if self.serves else "has closed its group"
            raise ArgumentError(f"this process does not train, because it {why}")
        return self._client

    def report(self) -> Report:
        """Return the figures of all servers: pushes, pulls and ages of gradients by worker.

        Raises:
            ArgumentError: this process is a server.
            CollectiveError: a server is gone.

        Example:
            report = group.report()
            print(report)              # one line for each server and worker
            print(report.age_max)
        """
        return self.client.report()

    def close(self) -> None:
        """Leave the group: the servers and the other workers go on."""
        observed.end()
        if self._client is not None:
            self._client.close()
            self._client = None
        self._open.close()

    def serve_storage(
        self,
        make_storage: MakeStorage,
        save: str | PathLike[str] | None = None,
        save_every: float = 60.0,
        load: str | PathLike[str] | None = None,
    ) -> None:
        """Do what an adapter's `serve` does, with the storage that it makes."""
        if self._store is None:
            why = "has served already" if self.serves else "is a worker: train with a replica"
            raise ArgumentError(f"this process cannot serve, because it {why}")
        save, load = (None if path is None else fspath(path) for path in (save, load))
        saving = Saving(self.index, self.servers, save, save_every, load)
        store, self._store = self._store, None
        with Endpoint(self._environment, store.local_host, {}) as endpoint:
            server = Server(
                self.index,
                self.servers,
                self._environment.size - self._environment.servers,
                self._job,
                endpoint.listeners(),
                make_storage,
                saving,
                self._environment.start_timeout,
            )
            # Workers find the server for as long as this connection lasts.
            store.publish(_key(self.index), endpoint.description)
            self._show(Watched(server.report))
            with _stopped_by_sigterm(server):
                server.run()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, watched: Watched) -> None:
        self._watched = watched
        observed.follow(watched, self._environment.rank, self._environment.size)

    def _reach_store(self) -> StoreClient:
        environment = self._environment
        deadline = Deadline(environment.start_timeout)
        address = environment.rendezvous
        if environment.serves_store:
            store = self._open.enter_context(serve_store(environment, self._job, deadline))
            address = store.address
        assert address is not None
        client = StoreClient(address, self._job, environment.rank, deadline)
        return self._open.enter_context(client)


def _key(index: int) -> str:
    return f"parameter_server/{index}"


def _reach_servers(worker: WorkerEnvironment, job: Job) -> Client:
    """Connect a worker to all servers, and wait for those that do not listen yet.

    It raises BootstrapError if a server did not publish its address in time, cannot be reached, or
    has ended.
    """
    assert worker.rendezvous is not None
    deadline = Deadline(worker.start_timeout)
    here = host_identity(worker.host_id)
    links: list[Link] = []
    try:
        with StoreClient(worker.rendezvous, job, worker.rank, deadline) as client:
            for index in range(worker.servers):
                try:
                    description: dict[str, Any] = client.look_up(_key(index))
                except PublisherGoneError:
                    raise BootstrapError(
                        f"parameter server {index} has ended, as servers do when no worker needs "
                        "them any more: this worker has started too late, and nothing is left to "
                        "train"
                    ) from None
                address = str(description["unix" if description["host"] == here else "tcp"])
                name = f"parameter server {index}"
                connection, _ = reach(name, address, job, worker.process, Role.PARAMETER, deadline)
                links.append(Link(connection, index))
    except BaseException:
        for link in links:
            link.close(goodbye=False)
        raise
    return Client(links)


class Watched:
    """Stands where ranks have an engine: a view of the job asks it once a second."""

    def __init__(self, report: Callable[[], ServerReport] | None = None) -> None:
        self._report = report  # A worker has none. Any thread may call it.
        self._began = time.monotonic()

    def live(self) -> dict[str, Any]:
        """Return what `_core.Engine.live` returns, for a process without collectives."""
        if self._report is not None:
            said = self._report()
            everything = Report([said])
            observed.observe(
                workers=sum(one.live for one in said.workers.values()),
                pushes=said.version,
                mean_age=everything.age_mean,
                largest_age=everything.age_max,
            )
        return {
            "time": time.monotonic(),
            "began": self._began,
            "counters": {},
            "events": [],
            "steps": None,
            "stalled": [],
        }


@contextlib.contextmanager
def _stopped_by_sigterm(server: Server) -> Iterator[None]:
    """Let SIGTERM end the service, so that it writes its last checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGTERM, lambda *_: server.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
