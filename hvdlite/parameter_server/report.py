"""Figures of the service: what each worker has done, and how old its gradients were."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

_RECENT = 64  # A rate is measured over so many pushes.


@dataclass(frozen=True)
class WorkerReport:
    """What one server knows of one worker.

    Attributes:
        clock: the number of steps that the worker has done.
        live: whether it is connected.
        pushes: the number of its pushes that were applied.
        pulls: the number of its pulls.
        rate: its pushes per second, over the latest ones.
        age_mean: the mean age of its pushes: how many pushes of others came between its pull and
            its push.
        age_max: the largest age.
        bytes_in: bytes that it has sent.
        bytes_out: bytes that it has received.
        waited: seconds for which it waited for workers behind it.

    Example:
        slow = [n for n, one in group.report().servers[0].workers.items() if one.age_mean > 20]
    """

    clock: int
    live: bool
    pushes: int
    pulls: int
    rate: float
    age_mean: float
    age_max: int
    bytes_in: int
    bytes_out: int
    waited: float


@dataclass(frozen=True)
class ServerReport:
    """What one server says of one collection.

    Attributes:
        server: the index of the server.
        collection: the name of the collection.
        version: the number of pushes that it has applied.
        nbytes: the number of bytes of the values that it holds.
        checkpoint: the file of its last checkpoint; None if there is none.
        workers: by the number of a worker.

    Example:
        for server in group.report().servers:
            print(server.server, server.nbytes, server.checkpoint)
    """

    server: int
    collection: str
    version: int
    nbytes: int
    checkpoint: str | None
    workers: dict[int, WorkerReport]

    def as_json(self) -> dict[str, Any]:
        """Return a value of JSON that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> ServerReport:
        """Read what `as_json` returned in another process.

        Args:
            said: that value.

        Returns:
            The report that `as_json` was called on.
        """
        workers = {int(key): WorkerReport(**one) for key, one in said["workers"].items()}
        return cls(**{**said, "workers": workers})


@dataclass(frozen=True)
class Report:
    """What all servers say; `group.report()` returns it, and `print` shows it as lines.

    Attributes:
        servers: for each server and collection, such as a model or a table, one report.

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
        return sum(one.age_mean * one.pushes for one in some) / pushes if pushes else 0.0

    @property
    def age_max(self) -> int:
        """The largest age of a push."""
        some = [one for server in self.servers for one in server.workers.values()]
        return max((one.age_max for one in some), default=0)

    def __str__(self) -> str:
        lines = []
        for server in self.servers:
            size = f"{server.nbytes / 1e6:.1f} MB"
            name = f" of {server.collection!r}" if server.collection else ""
            lines.append(f"server {server.server}: {size}{name}, {server.version} pushes")
            for number, one in server.workers.items():
                state = "" if one.live else " (gone)"
                lines.append(
                    f"  worker {number}{state}: step {one.clock}, {one.rate:.1f} pushes/s, age "
                    f"{one.age_mean:.1f} (at most {one.age_max}), {one.bytes_in / 1e6:.1f} MB in, "
                    f"{one.bytes_out / 1e6:.1f} MB out, waited {one.waited:.1f} s"
                )
        return "\n".join(lines)


@dataclass
class Tally:
    """Counts what one worker does with one collection. The caller locks."""

    clock: int = 0
    live: bool = True
    pushes: int = 0
    pulls: int = 0
    ages: int = 0
    oldest: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waited: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def pushed(self, clock: int, age: int, count: int) -> None:
        """Count a push of `count` bytes."""
        self.clock = max(self.clock, clock)
        self.pushes += 1
        self.ages += age
        self.oldest = max(self.oldest, age)
        self.bytes_in += count
        self.recent.append(time.monotonic())

    def pulled(self, clock: int, count: int, waited: float) -> None:
        """Count a pull of `count` bytes, which waited for others."""
        self.clock = max(self.clock, clock)
        self.pulls += 1
        self.bytes_out += count
        self.waited += waited

    def report(self) -> WorkerReport:
        """Return the figures until now."""
        seconds = time.monotonic() - self.recent[0] if self.recent else 0.0
        return WorkerReport(
            clock=self.clock,
            live=self.live,
            pushes=self.pushes,
            pulls=self.pulls,
            rate=len(self.recent) / seconds if seconds > 0 and self.live else 0.0,
            age_mean=self.ages / self.pushes if self.pushes else 0.0,
            age_max=self.oldest,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            waited=self.waited,
        )
