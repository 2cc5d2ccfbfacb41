"""The tensors of one server: their values, version, clocks and figures, and who may touch them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.parameter_server.tensors import (
    Gradient,
    MakeStorage,
    Storage,
    TensorSpec,
    difference,
    place,
)

_LOOK_SECONDS = 0.25  # A waiting session looks so often whether its worker lives.


class Collection:
    """The tensors of the model that this server holds. Any session's thread uses it.

    Bounded staleness is stale synchronous parallel (Ho et al., NIPS 2013). A worker at clock c that
    has a bound k gets values when every worker that takes part is at clock c - k or later. So it
    sees all pushes of the others up to that clock.
    """

    # `lock` guards the values and the version; `moved` guards the other fields that change. A push
    # is applied, and a pull copied, under `lock`, so that both are atomic on this server.
    # The first values of all servers come from one worker, the *filler*. Server 0 chooses it, and
    # chooses another one if it dies. The filler sends its values to server 0 last, so that those of
    # all servers are there when server 0 tells the others to go on.

    def __init__(
        self, specs: Sequence[TensorSpec], server: int, servers: int, make_storage: MakeStorage
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
        self.filler: int | None = None  # This worker sends them.
        self._workers: dict[int, WorkerReport] = {}
        self._last = 0  # A worker that joins when there are no others begins at this clock.

    def check(self, specs: Sequence[TensorSpec], worker: int) -> None:
        what = difference(specs, self.specs)
        if what is not None:
            raise MismatchError(
                f"worker {worker} registers another model than the workers before it: {what}; "
                "build the same model on every worker, and delete the checkpoint of another one"
            )

    def begin_at(self, version: int, clock: int) -> None:
        """Go on from a checkpoint, whose values are there."""
        self.version, self.filled, self._last = version, True, clock

    def may_fill(self, worker: int, told: bool, chooses: bool) -> bool | None:
        """Return whether a worker is to send the values; None if it has to wait. Under `moved`."""
        # `told` says that server 0 has chosen the worker, and `chooses` that this is server 0.
        if told and self.filled and self.version > 0:
            raise ArgumentError(
                f"this server has trained on, and server 0 takes first values from worker "
                f"{worker}; start the job again, and give all servers the same checkpoint"
            )
        if told or (chooses and not self.filled and self.filler is None):
            self.filler, self.filled = worker, False
            return True
        return False if self.filled else None

    def fill(self, values: Sequence[memoryview]) -> None:
        with self.lock:
            for index, one in enumerate(values):
                self.storage.write(index, one)
        with self.moved:
            self.filled, self.filler = True, None
            self.moved.notify_all()

    def join(self, worker: int, clock: int | None = None) -> int:
        """Let a worker take part, by default at the clock of the slowest one; return its clock."""
        with self.moved:
            clock = self._least() if clock is None else clock
            report = self._workers.setdefault(worker, WorkerReport())
            report.live, report.clock = True, clock
            return clock

    def leave(self, worker: int) -> None:
        with self.moved:
            if worker in self._workers:
                self._last = max(self._last, self._least())
                self._workers[worker].live = False
            if self.filler == worker:
                self.filler = None
            self.moved.notify_all()

    def push(self, worker: int, clock: int, seen: int, gradients: Sequence[Gradient]) -> int:
        """Apply a push, and return the version that it makes.

        `clock` counts the steps of the worker, and `seen` is the version that the gradients were
        computed on. Without gradients only the clock advances. If the gradients cannot be applied,
        it raises ArgumentError, and nothing has changed.
        """
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
            report = self.advance(worker, clock)
            report.pushes += 1
            if gradients:
                report.ages += age
                report.age_max = max(report.age_max, age)
        return version

    def pull(
        self,
        worker: int,
        clock: int,
        staleness: int | None,
        into: Sequence[memoryview],
        alive: Callable[[], None],
    ) -> int:
        """Wait until a worker may pull; copy all values, and return their version.

        The worker may be `staleness` steps ahead of the others; None waits for nobody. Meanwhile
        `alive` is called now and then, and raises if the worker has gone.
        """
        with self.moved:
            report = self.advance(worker, clock)
            while not self.may_pull(clock, staleness):
                if not self.moved.wait(_LOOK_SECONDS):
                    alive()
            report.pulls += 1
        with self.lock:
            for index, one in enumerate(into):
                self.storage.read(index, one)
            return self.version

    def advance(self, worker: int, clock: int) -> WorkerReport:
        """Set a worker's clock, unless it is further already. Under `moved`."""
        report = self._workers[worker]
        report.clock = max(report.clock, clock)
        self.moved.notify_all()
        return report

    def may_pull(self, clock: int, staleness: int | None) -> bool:
        """Return whether a worker at this clock may get values now. Under `moved`."""
        return staleness is None or self._least() >= clock - staleness

    def least_clock(self) -> int:
        with self.moved:
            return self._least()

    def _least(self) -> int:
        return min((one.clock for one in self._workers.values() if one.live), default=self._last)

    def report(self, server: int) -> ServerReport:
        with self.moved:
            workers = {worker: replace(one) for worker, one in sorted(self._workers.items())}
        return ServerReport(server, self.version, workers)


@dataclass
class WorkerReport:
    """What one server knows of one worker.

    Attributes:
        clock: the number of steps that the worker has done.
        live: whether it is connected.
        pushes: the number of its pushes that were applied.
        pulls: the number of its pulls.
        ages: the sum of the ages of its pushes: how many pushes of others came between its pull and
            its push.
        age_max: the largest age.

    Example:
        slow = [n for n, one in group.report().servers[0].workers.items() if one.age_mean > 20]
    """

    clock: int = 0
    live: bool = True
    pushes: int = 0
    pulls: int = 0
    ages: int = 0
    age_max: int = 0

    @property
    def age_mean(self) -> float:
        """The mean age of its pushes."""
        return self.ages / self.pushes if self.pushes else 0.0


@dataclass(frozen=True)
class ServerReport:
    """What one server says.

    Attributes:
        server: the index of the server.
        version: the number of pushes that it has applied.
        workers: by the number of a worker.

    Example:
        for server in group.report().servers:
            print(server.server, server.version)
    """

    server: int
    version: int = 0
    workers: Mapping[int, WorkerReport] = field(default_factory=dict)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> ServerReport:
        """Read the fields of a report of another process.

        Args:
            said: its fields as a value of JSON.

        Returns:
            The report of that process.
        """
        workers = {int(key): WorkerReport(**one) for key, one in said["workers"].items()}
        return cls(**{**said, "workers": workers})


@dataclass(frozen=True)
class Report:
    """What all servers say; `group.report()` returns it, and `print` shows it as lines.

    Attributes:
        servers: one report for each server.

    Example:
        report = group.report()
        print(report)
        if report.age_mean > 4 * group.workers:
            print("some worker is slow, and its gradients are old")
    """

    servers: list[ServerReport]

    @property
    def age_mean(self) -> float:
        """The mean age of all pushes; with W equally fast workers it is about W - 1."""
        some = [one for server in self.servers for one in server.workers.values()]
        pushes = sum(one.pushes for one in some)
        return sum(one.ages for one in some) / pushes if pushes else 0.0

    @property
    def age_max(self) -> int:
        """The largest age of a push."""
        some = [one for server in self.servers for one in server.workers.values()]
        return max((one.age_max for one in some), default=0)

    def __str__(self) -> str:
        lines = []
        for server in self.servers:
            lines.append(f"server {server.server}: {server.version} pushes")
            for number, one in server.workers.items():
                state = "" if one.live else " (gone)"
                lines.append(
                    f"  worker {number}{state}: step {one.clock}, {one.pushes} pushes, "
                    f"{one.pulls} pulls, age {one.age_mean:.1f} (at most {one.age_max})"
                )
        return "\n".join(lines)


def check_pace(staleness: int | None, push_every: int, pull_every: int) -> None:
    """Raise ArgumentError unless these are numbers of steps; `staleness` may be None."""
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ArgumentError(f"staleness={staleness!r} is not None, 0 or a number of steps")
    for name, every in (("push_every", push_every), ("pull_every", pull_every)):
        if type(every) is not int or every < 1:
            raise ArgumentError(f"{name}={every!r} is not a number of steps from 1 on")
