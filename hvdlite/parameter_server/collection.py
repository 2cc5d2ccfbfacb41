"""One collection on one server: its values, version, clocks and figures, and who may touch them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.parameter_server.clocks import Clocks
from hvdlite.parameter_server.placement import Part
from hvdlite.parameter_server.report import ServerReport, Tally
from hvdlite.parameter_server.storage import Gradient, Storage
from hvdlite.parameter_server.tensors import TensorSpec, difference

_LOOK_SECONDS = 0.25  # A waiting session looks so often whether its worker lives.
_MOST_GONE = 256  # So many workers that have gone are still in reports.
ALIGNMENT = 64


class Collection:
    """The parts that this server holds of one collection. Any session's thread uses it."""

    # `lock` guards the values and the version; `moved` guards the other fields that change. A push
    # is applied, and a pull copied, under `lock`, so that both are atomic on this server.
    # The first values of all servers come from one worker, the *filler*. Server 0 chooses it, and
    # chooses another one if it dies. The filler sends its values to server 0 last, so that those of
    # all servers are there when server 0 tells the others to go on.

    def __init__(
        self,
        number: int,
        name: str,
        specs: Sequence[TensorSpec],
        parts: Sequence[Part],
        storage: Storage,
        log: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """Begin a collection without values; `log` is told each push and each pull."""
        self.number = number
        self.name = name
        self.specs = list(specs)
        self.parts = list(parts)
        self.lock = threading.Lock()
        self.version = 0
        self.storage = storage
        self.moved = threading.Condition()
        self.filled = False  # It is set when the values are there.
        self._filler: int | None = None  # This worker sends them.
        self.clocks = Clocks()
        self.tallies: dict[int, Tally] = {}
        self._log = log
        self.offsets, self.staging_bytes = _layout(parts)

    def check(self, specs: Sequence[TensorSpec], worker: int) -> None:
        """Raise MismatchError if a worker registers other tensors under this name."""
        what = difference(specs, self.specs)
        if what is not None:
            raise MismatchError(
                f"worker {worker} registers another model than the workers before it: {what}; "
                "build the same model on every worker, and delete the checkpoint of another one"
            )

    def may_fill(self, worker: int, told: bool, chooses: bool) -> bool | None:
        """Return whether a worker is to send the values; None if it has to wait. Under `moved`."""
        # `told` says that server 0 has chosen the worker, and `chooses` that this is server 0.
        if told and self.filled and self.version > 0:
            raise ArgumentError(
                f"this server has trained on, and server 0 takes first values from worker "
                f"{worker}; start the job again, and give all servers the same checkpoint"
            )
        if told or (chooses and not self.filled and self._filler is None):
            self._filler, self.filled = worker, False
            return True
        return False if self.filled else None

    def is_filled_by(self, worker: int) -> bool:
        """Return whether this worker is to send the values."""
        return self._filler == worker

    def fill(self) -> None:
        """Note that the values are there."""
        with self.moved:
            self.filled, self._filler = True, None
            self.moved.notify_all()

    def begin_at(self, version: int, clock: int) -> None:
        """Go on from a checkpoint, whose values are there."""
        self.version = version
        self.filled = True
        self.clocks.begin_at(clock)

    def join(self, worker: int, clock: int | None) -> int:
        """Let a worker take part, and return its clock."""
        with self.moved:
            tally = self.tallies.setdefault(worker, Tally())
            tally.live = True
            tally.clock = self.clocks.join(worker, clock)
            return tally.clock

    def leave(self, worker: int) -> None:
        """Forget the clock of a worker that has gone."""
        with self.moved:
            self.clocks.leave(worker)
            if worker in self.tallies:
                self.tallies[worker].live = False
                gone = [number for number, tally in self.tallies.items() if not tally.live]
                for number in gone[:-_MOST_GONE]:
                    del self.tallies[number]
            if self._filler == worker:
                self._filler = None
            self.moved.notify_all()

    def push(
        self, worker: int, clock: int, seen: int, gradients: Sequence[Gradient], count: int
    ) -> int:
        """Apply a push, and return the version that it makes."""
        # `clock` counts the steps of the worker, `seen` is the version that the gradients were
        # computed on, and `count` the number of bytes that came. Without gradients only the clock
        # advances. If the gradients cannot be applied, it raises ArgumentError, and nothing has
        # changed.
        with self.lock:
            if seen > self.version:
                raise ArgumentError(
                    f"worker {worker} pushes gradients of version {seen}, and this server is at "
                    f"{self.version}"
                )
            age = self.version - seen
            if gradients:
                self.storage.apply(gradients)
                self.version += 1
            version = self.version
            if self._log is not None and gradients:
                self._log(self._line("push", worker, clock, version=version, seen=seen))
        with self.moved:
            self.tallies[worker].pushed(clock, age if gradients else 0, count)
            self.clocks.advance(worker, clock)
            self.moved.notify_all()
        return version

    def wait(
        self, worker: int, clock: int, staleness: int | None, alive: Callable[[], None]
    ) -> float:
        """Wait until a worker may pull, and return for how many seconds it waited."""
        # The worker may be `staleness` steps ahead of the others; None waits for nobody.
        begun = time.monotonic()
        with self.moved:
            self.clocks.advance(worker, clock)
            self.moved.notify_all()
            while not self.clocks.may_pull(clock, staleness):
                if not self.moved.wait(_LOOK_SECONDS):
                    # `alive` raises if the worker has gone.
                    alive()
            if self._log is not None and staleness is not None:
                self._log(self._line("pull", worker, clock, least=self.clocks.least))
        return time.monotonic() - begun

    def pulled(self, worker: int, clock: int, count: int, waited: float) -> None:
        """Count a pull."""
        with self.moved:
            self.tallies[worker].pulled(clock, count, waited)

    def report(self, server: int, checkpoint: str | None) -> ServerReport:
        """Return the figures until now."""
        with self.moved:
            workers = {worker: tally.report() for worker, tally in sorted(self.tallies.items())}
        nbytes = sum(part.nbytes for part in self.parts)
        return ServerReport(server, self.name, self.version, nbytes, checkpoint, workers)

    def _line(self, what: str, worker: int, clock: int, **more: int) -> dict[str, Any]:
        return {"what": what, "collection": self.name, "worker": worker, "clock": clock, **more}


def _layout(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Return where each part begins in memory for all of them, and the size of that memory."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
