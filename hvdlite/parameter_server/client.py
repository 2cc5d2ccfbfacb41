"""A worker's side: connections to all servers, and what the worker asks of them.

Requests to different servers travel at the same time, in one thread per server. The error of a
server that has died names it and its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, NoReturn, TypeVar

from hvdlite.errors import (
    ArgumentError,
    CollectiveError,
    HvdliteError,
    MismatchError,
    RankFailedError,
)
from hvdlite.parameter_server import wire
from hvdlite.parameter_server.collection import Report, ServerReport
from hvdlite.parameter_server.tensors import TensorSpec, encode, place
from hvdlite.rendezvous import descriptors

# A server shows a sign of life each second while a worker waits, so that one without is stuck.
_SILENCE_SECONDS = 120
_ERRORS: dict[int, type[HvdliteError]] = {
    wire.Status.MISMATCH: MismatchError,
    wire.Status.REFUSED: ArgumentError,
}
_TIMEVAL = struct.Struct("ll")

_Result = TypeVar("_Result")


class Rows(NamedTuple):
    numbers: memoryview  # ascending, each once, as signed 64-bit integers
    values: memoryview  # the bytes of the rows in this order


class Link:
    """The connection to one server. One thread at a time uses it."""

    def __init__(self, connection: socket.socket, index: int) -> None:
        connection.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(_SILENCE_SECONDS, 0))
        wire.tune(connection)
        self.index = index
        self.name = f"parameter server {index}"
        # The server holds the tensors with these indexes, and numbers them in this order.
        self.tensors: list[int] = []
        self.seen = 0  # This worker has the values of this version.
        self.checkpoint: str | None = None
        self._saved = 0
        self._connection = connection
        self._error: HvdliteError | None = None
        descriptors.leave_to_parent(self)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send a request; raise HvdliteError if the server has refused this worker, or is gone."""
        if self._error is not None:
            raise self._error
        try:
            wire.send(self._connection, pieces)
        except OSError:
            while True:
                self.answer()  # It raises why the server does not read on, or that it is gone.

    def answer(self) -> wire.Frame:
        """Receive the header of the next answer; raise as `send` does."""
        try:
            while True:
                frame = wire.receive_frame(self._connection)
                if self._check(frame):
                    self._saved = frame.clock
                    return frame
        except (OSError, wire.HungUpError) as error:
            self._lost(error)

    def body(self, frame: wire.Frame, pieces: Sequence[memoryview]) -> None:
        """Receive the body of an answer into memory; raise as `send` does."""
        expected = sum(piece.nbytes for piece in pieces)
        if frame.body != expected:
            wrong = f"{self.name} sends {frame.body} bytes instead of {expected}"
            self._fail(CollectiveError(wrong))
        try:
            wire.receive(self._connection, pieces)
        except (OSError, wire.HungUpError) as error:
            self._lost(error)

    def text(self, frame: wire.Frame) -> Any:
        """Receive the body of an answer as JSON; raise as `send` does."""
        memory = memoryview(bytearray(min(frame.body, wire.MAX_TEXT_BYTES)))
        self.body(frame, [memory])
        return json.loads(bytes(memory))

    def close(self, goodbye: bool) -> None:
        """End the connection, by default with a word, so that the server does not count a death."""
        with contextlib.suppress(OSError):
            if goodbye and self._error is None:
                wire.send(self._connection, [wire.Frame(wire.Operation.GOODBYE).pack()])
        self._error = self._error or HvdliteError("the connection to the servers is closed")
        self._connection.close()
        descriptors.forget(self)

    def interrupt(self) -> None:
        """Give the connection up, because nobody knows how far an exchange has come."""
        self._error = self._error or HvdliteError(
            "an earlier exchange with the parameter servers was interrupted, so that this worker "
            "cannot go on; end this process, and start another worker"
        )
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        self._connection.close()
        self._error = HvdliteError("a child of fork() has no connection to the parameter servers")

    def _check(self, frame: wire.Frame) -> bool:
        """Return whether a frame is an answer, not a sign of life; raise what it says."""
        if frame.kind == wire.Status.WAIT:
            return False
        if frame.kind in (wire.Status.DONE, wire.Status.FILL_IN):
            return True
        text = wire.receive_bytes(self._connection, min(frame.body, wire.MAX_TEXT_BYTES))
        self._error = _ERRORS.get(frame.kind, CollectiveError)(text.decode(errors="replace"))
        raise self._error

    def _lost(self, error: Exception) -> NoReturn:
        if isinstance(error, BlockingIOError):
            why = f"made no progress for {_SILENCE_SECONDS} s; is it stopped, or its host down?"
        else:
            why = "died: its connection to this worker ended"
        last = "it has not written a checkpoint"
        if self.checkpoint and self._saved:
            last = f"its last checkpoint is number {self._saved} in {self.checkpoint}"
        failure = RankFailedError(
            f"{self.name} {why}; {last}. Start the job again, with the same number of servers, and "
            "serve(save=...) goes on from the checkpoint"
        )
        failure.failed_rank = self.index
        self._fail(failure, error)

    def _fail(self, failure: HvdliteError, cause: Exception | None = None) -> NoReturn:
        self._error = failure
        raise failure from cause


class Client:
    """A worker's connections to all servers, and the model that it has registered with them."""

    # Any thread may ask for a report; one thread at a time registers the model and makes steps.

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = list(links)
        self._lock = threading.Lock()  # It is held for one request to all servers.
        self._pool = ThreadPoolExecutor(len(links)) if len(links) > 1 else None

    def on_all(self, call: Callable[[Link], _Result]) -> list[_Result]:
        """Call a function for the links of all servers at the same time; raise the first error."""
        with self._lock:
            try:
                if self._pool is None:
                    return [call(self._links[0])]
                futures = [self._pool.submit(call, link) for link in self._links]
                wait(futures)
                return [future.result() for future in futures]
            except HvdliteError:
                raise
            except BaseException:  # KeyboardInterrupt, for example, in the middle of a frame.
                for link in self._links:
                    link.interrupt()
                raise

    def report(self) -> Report:
        def ask(link: Link) -> ServerReport:
            link.send([wire.Frame(wire.Operation.REPORT).pack()])
            return ServerReport.from_json(link.text(link.answer()))

        return Report(self.on_all(ask))

    def register(self, specs: Sequence[TensorSpec], values: Sequence[memoryview]) -> int:
        """Register the tensors of a model; return the clock at which this worker begins.

        The first `values` are sent if this worker is to send them. It raises MismatchError if other
        workers, or the checkpoint, have other tensors, and HvdliteError if a server has refused
        this worker, or is gone.
        """
        server_of = place(specs, len(self._links))
        for link in self._links:
            link.tensors = [index for index, one in enumerate(server_of) if one == link.index]
        said: dict[str, Any] = {"tensors": encode(specs), "clock": None, "fills": False}
        said["fills"], said["clock"] = _register(self._links[0], said)
        for link in self._links[1:]:
            _register(link, said)
        if said["fills"]:
            for link in reversed(self._links):  # Server 0 comes last, see `Collection`.
                pieces = [values[index] for index in link.tensors]
                frame = wire.Frame(wire.Operation.FILL, body=sum(map(len, pieces)))
                link.send([frame.pack(), *pieces])
                link.seen = link.answer().version
        clock: int = said["clock"]
        return clock

    def step(
        self,
        clock: int,
        gradients: dict[int, memoryview | Rows] | None,
        into: Sequence[memoryview] | None,
        staleness: int | None = None,
    ) -> None:
        """Push, pull, or both, on all servers at the same time.

        `clock` counts the steps that this worker has done. `gradients` has by the index of a tensor
        what to push, and `into` by tensor the memory for its values; None means not to push, or not
        to pull. The worker may be `staleness` steps ahead of the others; None sets no bound. It
        raises HvdliteError if a server has refused this worker, or is gone.
        """

        def exchange(link: Link) -> None:
            # Both requests leave before this worker waits: the server applies, and answers at once.
            if gradients is not None:
                link.send(_push_request(link, clock, gradients))
            if into is not None:
                bound = 0 if staleness is None else staleness + 1
                link.send([wire.Frame(wire.Operation.PULL, 0, clock, bound).pack()])
            if gradients is not None:
                link.answer()
            if into is not None:
                frame = link.answer()
                link.body(frame, [into[index] for index in link.tensors])
                link.seen = frame.version

        self.on_all(exchange)

    def close(self, goodbye: bool = True) -> None:
        for link in self._links:
            link.close(goodbye)
        if self._pool is not None:
            self._pool.shutdown()


def _register(link: Link, said: dict[str, Any]) -> tuple[bool, int]:
    """Return whether this worker is to send the values, and the clock at which it begins."""
    body = json.dumps(said).encode()
    link.send([wire.Frame(wire.Operation.REGISTER, body=len(body)).pack(), body])
    frame = link.answer()
    link.seen = frame.version
    answer = link.text(frame)
    link.checkpoint = answer["checkpoint"]
    return frame.kind == wire.Status.FILL_IN, answer["clock"]


def _push_request(
    link: Link, clock: int, gradients: dict[int, memoryview | Rows]
) -> list[bytes | memoryview]:
    entries: list[bytes] = []
    pieces: list[bytes | memoryview] = []
    for own, index in enumerate(link.tensors):
        gradient = gradients.get(index)
        if isinstance(gradient, Rows):
            entries.append(wire.Entry(own, wire.Layout.ROWS, len(gradient.numbers)).pack())
            pieces += [gradient.numbers.cast("B"), gradient.values]
        elif gradient is not None:
            entries.append(wire.Entry(own).pack())
            pieces.append(gradient)
    body = sum(map(len, entries)) + sum(map(len, pieces))
    frame = wire.Frame(wire.Operation.PUSH, len(entries), clock, link.seen, body)
    return [frame.pack(), *entries, *pieces]
