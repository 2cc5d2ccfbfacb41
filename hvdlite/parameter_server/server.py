"""A parameter server: it accepts workers, holds tensors, and ends when the workers have ended.

One thread accepts connections, and each worker has a `Session`, whose thread answers its requests.
Whatever a worker sends, this thread takes no memory before it has checked sizes against what the
server knows of the tensors. After a request that cannot be meant, the worker gets the reason, and
the session ends; the other sessions do not notice.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.parameter_server.checkpoint import Saving
from hvdlite.parameter_server.collection import Collection, ServerReport
from hvdlite.parameter_server.tensors import Gradient, MakeStorage, TensorSpec, decode
from hvdlite.parameter_server.wire import (
    ENTRY_BYTES,
    MAX_TEXT_BYTES,
    ROW_NUMBER_BYTES,
    Entry,
    Frame,
    HungUpError,
    Layout,
    Operation,
    Status,
    receive,
    receive_bytes,
    receive_entries,
    receive_frame,
    send,
    tune,
)
from hvdlite.rendezvous import descriptors
from hvdlite.rendezvous.deadline import is_never
from hvdlite.rendezvous.handshake import EPOCHS, Job, Role, ServerHandshake
from hvdlite.rendezvous.service import Acceptor

_TICK_SECONDS = 0.25
_LINGER_SECONDS = 3.0  # For so long a dead worker's successor may come.
_SIGN_OF_LIFE_SECONDS = 1.0  # Two WAIT answers are so far apart.
# A refused worker may finish sending for so long, before it reads why.
_DRAIN_SECONDS = 5.0


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
            Acceptor(one, job, len(EPOCHS), self._selector, self._welcome, True, 2 * workers)
            for one in listeners
        ]
        self._lock = threading.Lock()
        self._collection: Collection | None = None
        self._sessions: dict[Session, threading.Thread] = {}
        self._came: set[int] = set()
        self._gone_at = 0.0  # The last session ended at this time.
        self._died = False  # It is set when a worker has ended without a goodbye.
        self._stopping = threading.Event()
        descriptors.leave_to_parent(self)

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

    @property
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
        descriptors.forget(self)


class Session:
    """Answers one worker. `serve` runs in the session's own thread."""

    def __init__(self, connection: socket.socket, worker: int, server: Server) -> None:
        """Take a connection, which the session owns."""
        self.worker = worker
        self._connection = connection
        self._server = server
        self._staging: dict[int, memoryview] = {}
        self._joined: Collection | None = None
        self._alive_at = 0.0
        self._handlers: dict[int, Callable[[Frame], None]] = {
            Operation.REGISTER: self._register,
            Operation.FILL: self._fill,
            Operation.PUSH: self._push,
            Operation.PULL: self._pull,
            Operation.REPORT: self._report,
        }

    def serve(self) -> None:
        """Answer requests until the worker goes."""
        well = False
        try:
            while (frame := receive_frame(self._connection)).kind != Operation.GOODBYE:
                self._handle(frame)
            well = True
        except (HungUpError, OSError):
            pass  # The worker died. What it had not sent completely was never applied.
        except HvdliteError as error:
            self._refuse(error)
        except Exception as error:
            traceback.print_exc()
            self._refuse(HvdliteError(f"{type(error).__name__}: {error}"))
        finally:
            if self._joined is not None:
                self._joined.leave(self.worker)
            self._connection.close()
            self._server.ended(self, well)

    def close(self) -> None:
        """End the session from another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close the copy of a forked child."""
        self._connection.close()

    def _handle(self, frame: Frame) -> None:
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise ArgumentError(f"worker {self.worker} sent the unknown request {frame.kind}")
        handler(frame)

    def _answer(
        self,
        status: Status,
        version: int = 0,
        pieces: Sequence[memoryview | bytes] = (),
    ) -> None:
        body = sum(len(piece) for piece in pieces)
        frame = Frame(status, 0, self._server.saved, version, body)
        send(self._connection, [frame.pack(), *pieces])

    def _refuse(self, error: HvdliteError) -> None:
        """Tell the worker why the session ends; it may still be sending."""
        server = f"parameter server {self._server.index}"
        print(f"hvdlite: {server} refuses worker {self.worker}: {error}", file=sys.stderr)
        status = Status.MISMATCH if isinstance(error, MismatchError) else Status.FAILED
        status = Status.REFUSED if isinstance(error, ArgumentError) else status
        with contextlib.suppress(OSError):
            self._answer(status, pieces=[f"{server}: {error}".encode()])
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(_DRAIN_SECONDS)
            end = time.monotonic() + _DRAIN_SECONDS
            while self._connection.recv(1 << 16) and time.monotonic() < end:
                pass

    def _look_alive(self) -> None:
        """Show the worker that this server lives; raise HungUpError if the worker has gone."""
        with contextlib.suppress(BlockingIOError):
            if not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise HungUpError("the worker closed the connection")
        if time.monotonic() > self._alive_at + _SIGN_OF_LIFE_SECONDS:
            self._alive_at = time.monotonic()
            self._answer(Status.WAIT)

    def _register(self, frame: Frame) -> None:
        """Let the worker take part: {tensors, clock, fills}."""
        if frame.body > MAX_TEXT_BYTES:
            raise ArgumentError(
                f"worker {self.worker} announces a list of tensors of {frame.body} bytes, which is "
                "too long"
            )
        try:
            said = json.loads(receive_bytes(self._connection, frame.body))
            clock, told = said["clock"], bool(said["fills"])
            specs = decode(said["tensors"])
            if clock is not None and type(clock) is not int:
                raise ValueError("a clock is a number")
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"worker {self.worker} does not describe its tensors as it should: {error}"
            ) from None
        collection = self._server.open(specs, self.worker)
        with collection.moved:
            self._joined = collection
            while (
                fills := collection.may_fill(self.worker, told, self._server.index == 0)
            ) is None:
                if not collection.moved.wait(0.25):
                    self._look_alive()
        status = Status.FILL_IN if fills else Status.DONE
        answer = {
            "clock": collection.join(self.worker, clock),
            "checkpoint": self._server.checkpoint_file,
        }
        body = json.dumps(answer).encode()
        self._answer(status, collection.version, [body])

    def _own(self) -> Collection:
        """Return the collection that a request is about."""
        if self._joined is None:
            raise ArgumentError(f"worker {self.worker} has not registered its tensors")
        return self._joined

    def _fill(self, frame: Frame) -> None:
        """Take the first values of all tensors."""
        collection = self._own()
        if not collection.is_filled_by(self.worker):
            raise ArgumentError(f"worker {self.worker} sends values that nobody asked for")
        self._check_body(frame, sum(one.nbytes for one in collection.tensors))
        values = self._staged_all(collection)
        receive(self._connection, values)
        with collection.lock:
            for index, one in enumerate(values):
                collection.storage.write(index, one)
        collection.fill()
        self._answer(Status.DONE, collection.version)

    def _push(self, frame: Frame) -> None:
        collection = self._own()
        self._check_filled(collection)
        entries = self._entries(frame, collection)
        sizes = [_entry_bytes(collection, entry) for entry in entries]
        self._check_body(frame, sum(sizes) + len(entries) * ENTRY_BYTES)
        gradients, pieces = [], []
        for entry, size in zip(entries, sizes, strict=True):
            if entry.layout == Layout.DENSE:
                gradients.append(Gradient(entry.tensor, self._staged(collection, entry.tensor)))
                pieces.append(gradients[-1].values)
                continue
            memory = memoryview(bytearray(size))
            split = entry.rows * ROW_NUMBER_BYTES
            gradients.append(Gradient(entry.tensor, memory[split:], memory[:split].cast("q")))
            pieces.append(memory)
        receive(self._connection, pieces)
        version = collection.push(self.worker, frame.clock, frame.version, gradients)
        self._answer(Status.DONE, version)

    def _pull(self, frame: Frame) -> None:
        """Send all values."""
        collection = self._own()
        self._check_filled(collection)
        self._check_body(frame, 0)
        staleness = None if frame.version == 0 else frame.version - 1
        collection.wait(self.worker, frame.clock, staleness, self._look_alive)
        values = self._staged_all(collection)
        with collection.lock:
            for index, one in enumerate(values):
                collection.storage.read(index, one)
            version = collection.version
        self._answer(Status.DONE, version, values)
        collection.pulled(self.worker, frame.clock)

    def _report(self, frame: Frame) -> None:
        self._check_body(frame, 0)
        body = json.dumps(asdict(self._server.report())).encode()
        self._answer(Status.DONE, pieces=[body])

    def _entries(self, frame: Frame, collection: Collection) -> list[Entry]:
        """Receive the entries of a body, and check each of them."""
        if frame.entries > len(collection.tensors):
            raise ArgumentError(
                f"worker {self.worker} names {frame.entries} tensors, and there are "
                f"{len(collection.tensors)}"
            )
        if frame.body < frame.entries * ENTRY_BYTES:
            self._check_body(frame, frame.entries * ENTRY_BYTES)
        entries = receive_entries(self._connection, frame.entries)
        if len({entry.tensor for entry in entries}) < len(entries):
            raise ArgumentError(f"worker {self.worker} names a tensor twice")
        for entry in entries:
            known = entry.tensor < len(collection.tensors) and entry.layout in set(Layout)
            if not known or entry.rows > collection.tensors[entry.tensor].rows:
                raise ArgumentError(
                    f"worker {self.worker} asks for what this server does not have: {entry}"
                )
            if entry.layout == Layout.DENSE and entry.rows:
                raise ArgumentError(f"worker {self.worker} gives rows to a dense entry: {entry}")
        return entries

    def _check_body(self, frame: Frame, expected: int) -> None:
        if frame.body != expected:
            name = Operation(frame.kind).name
            raise ArgumentError(
                f"worker {self.worker} announces {frame.body} bytes for {name}, and the tensors "
                f"that it names have {expected}"
            )

    def _check_filled(self, collection: Collection) -> None:
        if not collection.filled:
            raise ArgumentError(f"worker {self.worker} asks for values before they are there")

    def _staged_all(self, collection: Collection) -> list[memoryview]:
        return [self._staged(collection, index) for index in range(len(collection.tensors))]

    def _staged(self, collection: Collection, tensor: int) -> memoryview:
        """Return this session's own memory for a tensor."""
        if tensor not in self._staging:
            self._staging[tensor] = memoryview(bytearray(collection.tensors[tensor].nbytes))
        return self._staging[tensor]


def _entry_bytes(collection: Collection, entry: Entry) -> int:
    spec = collection.tensors[entry.tensor]
    if entry.layout == Layout.DENSE:
        return spec.nbytes
    return entry.rows * (ROW_NUMBER_BYTES + spec.row_bytes)
