"""A parameter server: it accepts workers, holds tensors, and ends when the workers have ended.

One thread accepts connections, and each worker has a `Session`, whose thread answers its requests.
Whatever a worker sends, this thread takes no more memory than the tensors need that it knows. After
a request that cannot be meant, the worker gets the reason, and the session ends; the other sessions
do not notice.
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
from hvdlite.parameter_server import wire
from hvdlite.parameter_server.checkpoint import Saving
from hvdlite.parameter_server.collection import Collection, ServerReport
from hvdlite.parameter_server.tensors import Gradient, MakeStorage, TensorSpec, decode
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
        saving: Saving,
        start_timeout: float = 60.0,
    ) -> None:
        """Make a server, which owns the listeners; only workers of `job` may connect.

        The job begins with so many `workers`. `make_storage` makes the storage when the first
        worker registers its tensors. Where no workers are left, the server waits `start_timeout`
        seconds for those that have never come.
        """
        self.index = index
        self.saving = saving
        self._servers = servers
        self._workers = workers
        self._start_timeout = math.inf if is_never(start_timeout) else start_timeout
        self._make_storage = make_storage
        self._selector = selectors.DefaultSelector()
        self._acceptors = [
            Acceptor(one, job, len(EPOCHS), self._selector, self._welcome, 2 * workers)
            for one in listeners
        ]
        self._lock = threading.Lock()
        self._collection: Collection | None = None
        self._sessions: dict[Session, threading.Thread] = {}
        self._came: set[int] = set()
        self._gone_at = 0.0  # The last session ended at this time.
        self._died = False  # It is set when a worker has ended without a goodbye.
        self._stopping = threading.Event()

    def run(self) -> None:
        self.saving.start()
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

    def open(self, specs: Sequence[TensorSpec], worker: int) -> Collection:
        """Return the collection; the first worker that registers its tensors makes it.

        It raises MismatchError if another worker has registered other tensors, and ArgumentError if
        the storage cannot be made.
        """
        with self._lock:
            if self._collection is None:
                made = Collection(specs, self.index, self._servers, self._make_storage)
                self.saving.restore(made)
                self._collection = made
            else:
                self._collection.check(specs, worker)
            return self._collection

    def report(self) -> ServerReport:
        collection = self._collection
        return ServerReport(self.index) if collection is None else collection.report(self.index)

    def ended(self, session: Session, well: bool) -> None:
        with self._lock:
            del self._sessions[session]
            self._died = self._died or not well
            self._gone_at = time.monotonic()

    def _over(self) -> bool:
        with self._lock:
            if self._sessions or not self._came:
                return False
            seconds = _LINGER_SECONDS if self._died else 0.0
            if len(self._came) < self._workers:
                seconds = self._start_timeout
            return time.monotonic() > self._gone_at + seconds

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        if handshake.role != Role.PARAMETER:
            connection.close()
            return
        wire.tune(connection)
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
        self.saving.close()


class Session:
    """Answers one worker. `serve` runs in the session's own thread."""

    def __init__(self, connection: socket.socket, worker: int, server: Server) -> None:
        self.worker = worker
        self._connection = connection
        self._server = server
        self._collection: Collection | None = None  # The worker has registered its tensors.
        self._staging: list[memoryview] = []  # This session's own memory for them.
        self._alive_at = 0.0
        self._handlers: dict[int, Callable[[wire.Frame], None]] = {
            wire.Operation.REGISTER: self._register,
            wire.Operation.FILL: self._fill,
            wire.Operation.PUSH: self._push,
            wire.Operation.PULL: self._pull,
            wire.Operation.REPORT: self._report,
        }

    def serve(self) -> None:
        well = False
        try:
            while (frame := wire.receive_frame(self._connection)).kind != wire.Operation.GOODBYE:
                handler = self._handlers.get(frame.kind)
                if handler is None:
                    raise ArgumentError(
                        f"worker {self.worker} sent the unknown request {frame.kind}"
                    )
                handler(frame)
            well = True
        except (wire.HungUpError, OSError):
            pass  # The worker died. What it had not sent completely was never applied.
        except HvdliteError as error:
            self._refuse(error)
        except Exception as error:
            traceback.print_exc()
            self._refuse(HvdliteError(f"{type(error).__name__}: {error}"))
        finally:
            if self._collection is not None:
                self._collection.leave(self.worker)
            self._connection.close()
            self._server.ended(self, well)

    def close(self) -> None:
        """End the session from another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _answer(
        self, status: wire.Status, version: int = 0, pieces: Sequence[memoryview | bytes] = ()
    ) -> None:
        body = sum(len(piece) for piece in pieces)
        frame = wire.Frame(status, 0, self._server.saving.number, version, body)
        wire.send(self._connection, [frame.pack(), *pieces])

    def _refuse(self, error: HvdliteError) -> None:
        """Tell the worker why the session ends; it may still be sending."""
        server = f"parameter server {self._server.index}"
        print(f"hvdlite: {server} refuses worker {self.worker}: {error}", file=sys.stderr)
        status = wire.Status.MISMATCH if isinstance(error, MismatchError) else wire.Status.FAILED
        status = wire.Status.REFUSED if isinstance(error, ArgumentError) else status
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
                raise wire.HungUpError("the worker closed the connection")
        if time.monotonic() > self._alive_at + _SIGN_OF_LIFE_SECONDS:
            self._alive_at = time.monotonic()
            self._answer(wire.Status.WAIT)

    def _register(self, frame: wire.Frame) -> None:
        """Let the worker take part: {tensors, clock, fills}."""
        if frame.body > wire.MAX_TEXT_BYTES:
            raise ArgumentError(
                f"worker {self.worker} announces a list of tensors of {frame.body} bytes, which is "
                "too long"
            )
        try:
            said = json.loads(wire.receive_bytes(self._connection, frame.body))
            clock, told = said["clock"], bool(said["fills"])
            specs = decode(said["tensors"])
            if clock is not None and type(clock) is not int:
                raise ValueError("a clock is a number")
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"worker {self.worker} does not describe its tensors as it should: {error}"
            ) from None
        collection = self._server.open(specs, self.worker)
        chooses = self._server.index == 0
        with collection.moved:
            self._collection = collection
            while (fills := collection.may_fill(self.worker, told, chooses)) is None:
                if not collection.moved.wait(_TICK_SECONDS):
                    self._look_alive()
        self._staging = [memoryview(bytearray(one.nbytes)) for one in collection.tensors]
        status = wire.Status.FILL_IN if fills else wire.Status.DONE
        joined_at = collection.join(self.worker, clock)
        answer = {"clock": joined_at, "checkpoint": self._server.saving.file}
        self._answer(status, collection.version, [json.dumps(answer).encode()])

    def _fill(self, frame: wire.Frame) -> None:
        collection = self._registered()
        if collection.filler != self.worker:
            raise ArgumentError(f"worker {self.worker} sends values that nobody asked for")
        self._check_body(frame, sum(one.nbytes for one in collection.tensors))
        wire.receive(self._connection, self._staging)
        collection.fill(self._staging)
        self._answer(wire.Status.DONE, collection.version)

    def _push(self, frame: wire.Frame) -> None:
        collection = self._filled()
        tensors = collection.tensors
        if frame.entries > len(tensors):
            raise ArgumentError(
                f"worker {self.worker} names {frame.entries} tensors, and there are {len(tensors)}"
            )
        size = frame.entries * wire.ENTRY_BYTES
        if frame.body < size:
            self._check_body(frame, size)
        gradients: dict[int, Gradient] = {}
        pieces = []
        for entry in wire.receive_entries(self._connection, frame.entries):
            tensor, layout, rows = entry
            known = tensor < len(tensors) and tensor not in gradients and layout in set(wire.Layout)
            if not known or rows > (tensors[tensor].rows if layout == wire.Layout.ROWS else 0):
                raise ArgumentError(
                    f"worker {self.worker} pushes what does not fit this server's tensors: {entry}"
                )
            if layout == wire.Layout.ROWS:
                split = rows * wire.ROW_NUMBER_BYTES
                memory = memoryview(bytearray(split + rows * tensors[tensor].row_bytes))
                numbers, values = memory[:split].cast("q"), memory[split:]
                gradients[tensor] = Gradient(tensor, values, numbers)
            else:
                memory = self._staging[tensor]
                gradients[tensor] = Gradient(tensor, memory)
            pieces.append(memory)
        self._check_body(frame, size + sum(one.nbytes for one in pieces))
        wire.receive(self._connection, pieces)
        pushed = list(gradients.values())
        version = collection.push(self.worker, frame.clock, frame.version, pushed)
        self._answer(wire.Status.DONE, version)

    def _pull(self, frame: wire.Frame) -> None:
        collection = self._filled()
        self._check_body(frame, 0)
        staleness = None if frame.version == 0 else frame.version - 1
        version = collection.pull(
            self.worker, frame.clock, staleness, self._staging, self._look_alive
        )
        self._answer(wire.Status.DONE, version, self._staging)

    def _report(self, frame: wire.Frame) -> None:
        self._check_body(frame, 0)
        body = json.dumps(asdict(self._server.report())).encode()
        self._answer(wire.Status.DONE, pieces=[body])

    def _registered(self) -> Collection:
        if self._collection is None:
            raise ArgumentError(f"worker {self.worker} has not registered its tensors")
        return self._collection

    def _filled(self) -> Collection:
        collection = self._registered()
        if not collection.filled:
            raise ArgumentError(f"worker {self.worker} asks for values before they are there")
        return collection

    def _check_body(self, frame: wire.Frame, expected: int) -> None:
        if frame.body != expected:
            name = wire.Operation(frame.kind).name
            raise ArgumentError(
                f"worker {self.worker} announces {frame.body} bytes for {name}, and the tensors "
                f"that it names have {expected}"
            )
