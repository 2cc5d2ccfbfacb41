"""What `connect` returns: this process as a server or as a worker, without a framework.

Adapters derive from `Group`, and add what knows tensors: `serve` and `replica`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from os import PathLike, fspath
from types import FrameType, TracebackType
from typing import TypeVar

from hvdlite import reporting
from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.checkpoint import file_of
from hvdlite.parameter_server.client import Client
from hvdlite.parameter_server.log import Log
from hvdlite.parameter_server.meeting import publish, reach_servers
from hvdlite.parameter_server.report import Report
from hvdlite.parameter_server.saving import Saving
from hvdlite.parameter_server.server import Server
from hvdlite.parameter_server.storage import MakeStorage
from hvdlite.parameter_server.view import Watched, figures_of
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.endpoint import Endpoint
from hvdlite.rendezvous.environment import WorkerEnvironment, detect
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.serving import serve_store
from hvdlite.rendezvous.store import StoreClient

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
        """Connect a worker to all servers; a server is reached when it serves."""
        # The call raises BootstrapError if the servers cannot be reached in time.
        self._environment = environment
        self._open = contextlib.ExitStack()
        self._job = Job(environment.token, environment.job_id, environment.epoch)
        self.servers = environment.servers
        self.serves = environment.rank < environment.servers
        self.index = environment.rank if self.serves else environment.process - environment.servers
        self.knows_workers = False
        self._client: Client | None = None
        self._store: StoreClient | None = None
        self._watched = Watched()
        try:
            if self.serves:
                self._store = self._reach_store()
            else:
                self._client = reach_servers(environment, self._job)
                self._show(self._watched)
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
        """Ask all servers for their figures: ages of gradients, rates and bytes by worker.

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
        reporting.end()
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
        log: str | PathLike[str] | None = None,
    ) -> None:
        """Serve until the workers have ended, or SIGTERM asks this process to end."""
        # `save`, `load` and `log` are paths as in `serve`; `save_every` is in seconds. The call
        # raises ArgumentError if this process is a worker, or has served already.
        if self._store is None:
            why = "has served already" if self.serves else "is a worker: train with a replica"
            raise ArgumentError(f"this process cannot serve, because it {why}")
        saving = Saving(self.index, self.servers, _text(save), save_every, _text(load))
        store, self._store = self._store, None
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(Endpoint(self._environment, store.local_host, {}))
            write = None
            if log is not None:
                file = file_of(fspath(log), self.index, self.servers)
                write = stack.enter_context(Log(file)).write
            server = Server(
                self.index,
                self.servers,
                self._environment.size - self._environment.servers,
                self._job,
                endpoint.listeners(),
                make_storage,
                saving,
                write,
                self._environment.start_timeout,
            )
            publish(store, self.index, endpoint)
            self._show(Watched(lambda: figures_of(server.report())))
            with _stopped_by_sigterm(server):
                server.run()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _show(self, watched: Watched) -> None:
        """Report on this process, if a view of the job wants it."""
        self._watched = watched
        reporting.follow(watched, self._environment.rank, self._environment.size)

    def _reach_store(self) -> StoreClient:
        """Connect a server to the store, which server 0 serves if the launcher does not."""
        environment = self._environment
        deadline = Deadline(environment.start_timeout)
        address = environment.rendezvous
        if environment.serves_store:
            address = self._open.enter_context(
                serve_store(environment, self._job, deadline)
            ).address
        assert address is not None
        client = StoreClient(address, self._job, environment.rank, deadline)
        return self._open.enter_context(client)


def environment_of_this_process() -> WorkerEnvironment:
    """Return what the launcher says of this process; BootstrapError if it has no servers."""
    return detect(with_servers=True)


def _text(path: str | PathLike[str] | None) -> str | None:
    return None if path is None else fspath(path)


@contextlib.contextmanager
def _stopped_by_sigterm(server: Server) -> Iterator[None]:
    """Let SIGTERM end the service, so that it writes its last checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
