"""Figures of the service: what each worker has done, and how old its gradients were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
