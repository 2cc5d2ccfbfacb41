"""Parameter servers for tests: threads of this process, over the sockets of real jobs.

with Servers(2, storage_of(lambda params: torch.optim.SGD(params, lr=0.1))) as servers:
    replica = Replica(servers.client(), model.named_parameters())
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from hvdlite.parameter_server.checkpoint import Saving
from hvdlite.parameter_server.client import Client, Link
from hvdlite.parameter_server.server import Server
from hvdlite.parameter_server.tensors import MakeStorage, Storage, TensorSpec
from hvdlite.rendezvous.address import address_of, fresh_unix_address, listen
from hvdlite.rendezvous.client import introduce
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job, Role
from patience import HANG


def storage_of(make_optimizer: Callable[..., Any], **options: Any) -> MakeStorage:
    """Return what makes torch's storage with this optimizer."""
    from hvdlite.torch.parameter_server import TorchStorage

    def make(tensors: Sequence[TensorSpec]) -> Storage:
        return TorchStorage(tensors, make_optimizer, **options)

    return make


class Servers:
    """Running servers; a context manager, which fails if one of them does not end."""

    def __init__(
        self,
        count: int,
        make_storage: MakeStorage,
        workers: int = 1,
        save: str | None = None,
        save_every: float = 60.0,
    ) -> None:
        """Start `count` servers."""
        self.job = Job(secrets.token_bytes(32), secrets.token_bytes(16), 0)
        self._clients: list[Client] = []
        self._next = count
        listeners = [listen(fresh_unix_address()) for _ in range(count)]
        self.addresses = [address_of(one) for one in listeners]
        self.servers = [
            Server(
                index,
                count,
                workers,
                self.job,
                [listener],
                make_storage,
                saving=Saving(index, count, save, save_every),
            )
            for index, listener in enumerate(listeners)
        ]
        self.threads = [threading.Thread(target=one.run, daemon=True) for one in self.servers]
        for thread in self.threads:
            thread.start()

    def connect(self, server: int = 0, worker: int = 9) -> socket.socket:
        """Open a bare connection to a server, after the handshake."""
        way = (self.addresses[server], self.job, worker, Role.PARAMETER, Deadline(HANG))
        return introduce(*way)[0]

    def client(self, *model: Any) -> Client:
        """Connect the next worker, which may register a model: its specs and first values."""
        worker, self._next = self._next, self._next + 1
        count = len(self.servers)
        links = [Link(self.connect(index, worker), index) for index in range(count)]
        self._clients.append(Client(links))
        if model:
            self._clients[-1].register(*model)
        return self._clients[-1]

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all workers, which ends the servers."""
        for client in self._clients:
            client.close()
        if kind is not None:
            for server in self.servers:
                server.stop()
        for thread in self.threads:
            thread.join(HANG)
            assert kind is not None or not thread.is_alive(), "a server did not end"
