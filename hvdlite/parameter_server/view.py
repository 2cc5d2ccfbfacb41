"""What the live view of a job is told by a server and by a worker, which have no engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdlite import observed
from hvdlite.parameter_server.report import Report


class Watched:
    """Stands where ranks have an engine: the live view asks it once a second."""

    # Its figures are shown among the values of `hvd.observe`. It has no steps of its own, since
    # workers do not step together.

    def __init__(self, figures: Callable[[], Mapping[str, float]] = dict) -> None:
        # Any thread may call `figures`, which returns the last values by name.
        self._figures = figures
        self._began = time.monotonic()

    def live(self) -> dict[str, Any]:
        """Return what `_core.Engine.live` returns, for a process without collectives."""
        values: dict[str, Any] = dict(self._figures())
        observed.observe(**values)
        return {
            "time": time.monotonic(),
            "began": self._began,
            "counters": {},
            "events": [],
            "dropped_events": 0,
            "steps": None,
            "stalled": [],
        }


def figures_of(report: Report) -> dict[str, float]:
    """Sum up what one server says of its workers, for the live view."""
    workers = [one for server in report.servers for one in server.workers.values()]
    return {
        "workers": len(
            {key for one in report.servers for key, at in one.workers.items() if at.live}
        ),
        "pushes_per_second": sum(one.rate for one in workers),
        "pushes": sum(server.version for server in report.servers),
        "mean_age": report.age_mean,
        "largest_age": report.age_max,
        "gigabytes_in": sum(one.bytes_in for one in workers) / 1e9,
        "gigabytes_out": sum(one.bytes_out for one in workers) / 1e9,
    }
