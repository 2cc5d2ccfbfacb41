"""What the tests cost: `pytest --costs` prints how long they take, and compute.

The processor time of a test is what this process and everything that it started used meanwhile: the
ranks, and what they imported. A test that computes less than it takes waits for the rest: for a
deadline, a sleep, another process, or a core. The first test of a file that shares a world or an
import with others pays for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_TICK = os.sysconf("SC_CLK_TCK")
_TESTS_SHOWN = 60


def processor_seconds() -> float:
    """Return the processor time of this process and of all that descends from it."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It has ended.
        children.setdefault(int(fields[1]), []).append(int(name))
        ticks[int(name)] = sum(map(int, fields[11:15]))
    total, frontier = 0, [os.getpid()]
    while frontier:
        pid = frontier.pop()
        total += ticks.get(pid, 0)
        frontier += children.get(pid, ())
    return total / _TICK


class Costs:
    """Measures each test in the process that runs it, and sums up in the one that reports."""

    def __init__(self) -> None:
        self._of_tests: dict[str, tuple[float, float]] = {}  # wall, processor

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with the fixtures that begin or end in it."""
        begun, used = time.monotonic(), processor_seconds()
        item.user_properties.append(("costs", (begun, used)))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
        """Write the costs so far into the report of each phase."""
        report = yield
        begun, used = dict(item.user_properties)["costs"]
        spent = (time.monotonic() - begun, max(0.0, processor_seconds() - used))
        report.user_properties = [("costs", spent)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the costs of the last phase of a test."""
        spent = dict(report.user_properties).get("costs")
        if spent is not None:  # A worker of xdist that crashed has measured nothing.
            self._of_tests[report.nodeid] = spent

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the three tables."""
        write = terminalreporter.write_line
        for title, group_of in (
            ("folder", lambda test: str(Path(test.partition("::")[0]).parent)),
            ("file", lambda test: test.partition("::")[0]),
            ("test", lambda test: test),
        ):
            write(f"{'tests':>6} {'wall':>8} {'computed':>9}  {title}")
            costliest = sorted(self._summed(group_of).items(), key=lambda row: -max(row[1][1:]))
            for name, (count, wall, used) in costliest[:_TESTS_SHOWN]:
                write(f"{count:>6} {wall:8.1f} {used:9.1f}  {name}")

    def _summed(self, group_of: Callable[[str], str]) -> dict[str, tuple[int, float, float]]:
        sums: dict[str, tuple[int, float, float]] = {}
        for test, (wall, used) in self._of_tests.items():
            count, walls, uses = sums.get(group_of(test), (0, 0.0, 0.0))
            sums[group_of(test)] = (count + 1, walls + wall, uses + used)
        return sums
