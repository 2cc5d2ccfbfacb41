"""One worker's connection on a server, and the thread that answers its requests.

Whatever a worker sends, this thread takes no memory before it has checked sizes against what the
server knows of the tensors. After a request that cannot be meant, the worker gets the reason, and
the session ends; the other sessions do not notice.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.parameter_server.collection import Collection
from hvdlite.parameter_server.report import ServerReport
from hvdlite.parameter_server.storage import Gradient
from hvdlite.parameter_server.tensors import TensorSpec, decode
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
)

_SIGN_OF_LIFE_SECONDS = 1.0  # Two WAIT answers are so far apart.
# A refused worker may finish sending for so long, before it reads why.
_DRAIN_SECONDS = 5.0


class Owner(Protocol):
    """The server, as a session sees it."""

    index: int

    @property
    def saved(self) -> int:
        """The number of the last checkpoint; 0 for none."""

    def open(self, specs: Sequence[TensorSpec], worker: int) -> Collection:
        """Return the collection, which the first worker makes."""

    def report(self) -> ServerReport:
        """Return the figures of this server."""

    def checkpoint_file(self) -> str | None:
        """Return the file of checkpoints; None if the server does not write any."""

    def ended(self, session: Session, well: bool) -> None:
        """Note the end of a session."""


class Session:
    """Answers one worker. `serve` runs in the session's own thread."""

    def __init__(self, connection: socket.socket, worker: int, owner: Owner) -> None:
        """Take a connection, which the session owns."""
        self.worker = worker
        self._connection = connection
        self._owner = owner
        self._staging: mmap.mmap | None = None
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
            self._staging = None
            self._connection.close()
            self._owner.ended(self, well)

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
        frame = Frame(status, 0, self._owner.saved, version, body)
        send(self._connection, [frame.pack(), *pieces])

    def _refuse(self, error: HvdliteError) -> None:
        """Tell the worker why the session ends; it may still be sending."""
        server = f"parameter server {self._owner.index}"
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
        collection = self._owner.open(specs, self.worker)
        with collection.moved:
            self._joined = collection
            while (fills := collection.may_fill(self.worker, told, self._owner.index == 0)) is None:
                if not collection.moved.wait(0.25):
                    self._look_alive()
        status = Status.FILL_IN if fills else Status.DONE
        answer = {
            "clock": collection.join(self.worker, clock),
            "checkpoint": self._owner.checkpoint_file(),
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
        body = json.dumps(asdict(self._owner.report())).encode()
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
        """Return this session's own memory for a tensor; pages that nobody touches cost nothing."""
        if self._staging is None:
            self._staging = mmap.mmap(-1, max(1, collection.staging_bytes))
        begin = collection.offsets[tensor]
        return memoryview(self._staging)[begin : begin + collection.tensors[tensor].nbytes]


def _entry_bytes(collection: Collection, entry: Entry) -> int:
    spec = collection.tensors[entry.tensor]
    if entry.layout == Layout.DENSE:
        return spec.nbytes
    return entry.rows * (ROW_NUMBER_BYTES + spec.row_bytes)
