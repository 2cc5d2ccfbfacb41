"""A parameter server: it accepts workers, holds tensors, and ends when the workers have ended.

One thread accepts connections, and each worker has a thread of its own (`session`).
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from hvdlite.parameter_server.collection import Collection
from hvdlite.parameter_server.report import ServerReport
from hvdlite.parameter_server.saving import Saving
from hvdlite.parameter_server.session import Session
from hvdlite.parameter_server.storage import MakeStorage
from hvdlite.parameter_server.tensors import TensorSpec
from hvdlite.parameter_server.wire import tune
from hvdlite.rendezvous import forked
from hvdlite.rendezvous.acceptor import Acceptor
from hvdlite.rendezvous.deadline import is_never
from hvdlite.rendezvous.handshake import EPOCHS, Job, Role, ServerHandshake

_TICK_SECONDS = 0.25
_ROOM = 1024  # So many handshakes may run at once.
_LINGER_SECONDS = 3.0  # For so long a dead worker's successor may come.


class Server:
    """One parameter server; `run` serves until the workers have ended."""

    # `_lock` guards the collection, the sessions and the counts.

    def __init__(
        self,
        index: int,
        servers: int,
        workers: int,
        job: Job,
        listeners: Sequence[socket.socket],
        make_storage: MakeStorage,
        saving: Saving | None = None,
        patience: float = 60.0,
    ) -> None:
        """Make a server, which owns the listeners; only workers of `job` may connect."""
        # The job begins with so many `workers`. `make_storage` makes the storage when the first
        # worker registers its tensors. By default there are no checkpoints. Where no workers are
        # left, the server waits `patience` seconds for those that have never come.
        self.index = index
        self._saving = saving or Saving(index, servers)
        self._servers = servers
        self._workers = workers
        self._patience = math.inf if is_never(patience) else patience
        self._make_storage = make_storage
        self._listeners = list(listeners)
        self._selector = selectors.DefaultSelector()
        self._acceptors = [
            Acceptor(one, job, len(EPOCHS), self._selector, self._welcome, True, _ROOM)
            for one in listeners
        ]
        self._lock = threading.Lock()
        self._collection: Collection | None = None
        self._sessions: dict[Session, threading.Thread] = {}
        self._came: set[int] = set()
        self._gone_at = 0.0  # The last session ended at this time.
        self._died = False  # It is set when a worker has ended without a goodbye.
        self._stopping = threading.Event()
        forked.leave_to_parent(self)

    @property
    def saved(self) -> int:
        """The number of the last checkpoint; 0 for none."""
        return self._saving.number

    def run(self) -> None:
        """Serve until the workers have ended, or `stop` is called."""
        self._saving.start(self._filled)
        try:
            while not self._stopping.is_set() and not self._over():
                for key, _ in self._selector.select(_TICK_SECONDS):
                    key.data()
                for acceptor in self._acceptors:
                    acceptor.expire()
        finally:
            self._close()

    def stop(self) -> None:
        """Have `run` return soon; any thread and any signal handler may call this."""
        self._stopping.set()

    def close_in_child(self) -> None:
        """Close the copies of a forked child, but leave the selector, which both share."""
        for listener in self._listeners:
            listener.close()
        for session in list(self._sessions):
            session.close_in_child()

    def open(self, specs: Sequence[TensorSpec], worker: int) -> Collection:
        """Return the collection; the first worker that registers its tensors makes it."""
        # The call raises MismatchError if another worker has registered other tensors, and
        # ArgumentError if the storage cannot be made.
        with self._lock:
            if self._collection is None:
                made = Collection(specs, self.index, self._servers, self._make_storage)
                self._saving.restore(made)
                self._collection = made
            else:
                self._collection.check(specs, worker)
            return self._collection

    def report(self) -> ServerReport:
        """Return the figures of this server."""
        collection = self._collection
        return ServerReport(self.index) if collection is None else collection.report(self.index)

    def checkpoint_file(self) -> str | None:
        """Return the file of checkpoints; None if this server does not write any."""
        return self._saving.file

    def ended(self, session: Session, well: bool) -> None:
        """Note the end of a session."""
        with self._lock:
            del self._sessions[session]
            self._died = self._died or not well
            self._gone_at = time.monotonic()

    def _filled(self) -> Collection | None:
        """Return the collection if it has values."""
        collection = self._collection
        return collection if collection is not None and collection.filled else None

    def _over(self) -> bool:
        """Return whether all workers have come and gone."""
        with self._lock:
            if self._sessions or not self._came:
                return False
            patience = _LINGER_SECONDS if self._died else 0.0
            if len(self._came) < self._workers:
                patience = self._patience
            return time.monotonic() > self._gone_at + patience

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != Role.PARAMETER:
            connection.close()
            return
        tune(connection)
        session = Session(connection, handshake.rank, self)
        name = f"hvdlite-parameters-{handshake.rank}"
        thread = threading.Thread(target=session.serve, name=name, daemon=True)
        with self._lock:
            self._came.add(handshake.rank)
            self._sessions[session] = thread
        thread.start()

    def _close(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        self._selector.close()
        with self._lock:
            left = dict(self._sessions)
        for session, thread in left.items():
            session.close()
            thread.join(_LINGER_SECONDS)
        self._saving.close()
        forked.forget(self)
