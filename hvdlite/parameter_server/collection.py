"""The tensors of one server: their values, version, clocks and figures, and who may touch them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.parameter_server.clocks import Clocks
from hvdlite.parameter_server.report import ServerReport, WorkerReport
from hvdlite.parameter_server.storage import Gradient, MakeStorage, Storage
from hvdlite.parameter_server.tensors import TensorSpec, difference, place

_LOOK_SECONDS = 0.25  # A waiting session looks so often whether its worker lives.
_MOST_GONE = 256  # So many workers that have gone are still in reports.


class Collection:
    """The tensors of the model that this server holds. Any session's thread uses it."""

    # `lock` guards the values and the version; `moved` guards the other fields that change. A push
    # is applied, and a pull copied, under `lock`, so that both are atomic on this server.
    # The first values of all servers come from one worker, the *filler*. Server 0 chooses it, and
    # chooses another one if it dies. The filler sends its values to server 0 last, so that those of
    # all servers are there when server 0 tells the others to go on.

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        server: int,
        servers: int,
        make_storage: MakeStorage,
    ) -> None:
        """Begin without values; `specs` are all tensors of the model."""
        self.specs = list(specs)
        pairs = zip(specs, place(specs, servers), strict=True)
        self.tensors = [spec for spec, holder in pairs if holder == server]
        self.lock = threading.Lock()
        self.version = 0
        self.storage: Storage = make_storage(self.tensors)
        self.moved = threading.Condition()
        self.filled = False  # It is set when the values are there.
        self._filler: int | None = None  # This worker sends them.
        self.clocks = Clocks()
        self.workers: dict[int, WorkerReport] = {}

    def check(self, specs: Sequence[TensorSpec], worker: int) -> None:
        """Raise MismatchError if a worker registers other tensors."""
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
            report = self.workers.setdefault(worker, WorkerReport())
            report.live = True
            report.clock = self.clocks.join(worker, clock)
            return report.clock

    def leave(self, worker: int) -> None:
        """Forget the clock of a worker that has gone."""
        with self.moved:
            self.clocks.leave(worker)
            if worker in self.workers:
                self.workers[worker].live = False
                gone = [number for number, one in self.workers.items() if not one.live]
                for number in gone[:-_MOST_GONE]:
                    del self.workers[number]
            if self._filler == worker:
                self._filler = None
            self.moved.notify_all()

    def push(self, worker: int, clock: int, seen: int, gradients: Sequence[Gradient]) -> int:
        """Apply a push, and return the version that it makes."""
        # `clock` counts the steps of the worker, and `seen` is the version that the gradients were
        # computed on. Without gradients only the clock advances. If the gradients cannot be
        # applied, it raises ArgumentError, and nothing has changed.
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
        with self.moved:
            report = self.workers[worker]
            report.clock = max(report.clock, clock)
            report.pushes += 1
            if gradients:
                report.ages += age
                report.age_max = max(report.age_max, age)
            self.clocks.advance(worker, clock)
            self.moved.notify_all()
        return version

    def wait(
        self, worker: int, clock: int, staleness: int | None, alive: Callable[[], None]
    ) -> None:
        """Wait until a worker may pull."""
        # The worker may be `staleness` steps ahead of the others; None waits for nobody.
        with self.moved:
            self.clocks.advance(worker, clock)
            self.moved.notify_all()
            while not self.clocks.may_pull(clock, staleness):
                if not self.moved.wait(_LOOK_SECONDS):
                    # `alive` raises if the worker has gone.
                    alive()

    def pulled(self, worker: int, clock: int) -> None:
        """Count a pull."""
        with self.moved:
            report = self.workers[worker]
            report.clock = max(report.clock, clock)
            report.pulls += 1

    def report(self, server: int) -> ServerReport:
        """Return the figures until now."""
        with self.moved:
            workers = {worker: replace(one) for worker, one in sorted(self.workers.items())}
        return ServerReport(server, self.version, workers)
