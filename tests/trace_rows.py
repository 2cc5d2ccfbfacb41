"""Read a merged timeline into the rows of each process, and check that their spans nest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEGOTIATION = 1_000_000


@dataclass
class Span:
    """A span, and the spans and marks inside it; times are in nanoseconds."""

    name: str
    begin: int
    end: int | None = None  # None: it never ended
    args: dict[str, Any] = field(default_factory=dict)
    inner: list[Span] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)

    def walk(self) -> Iterator[Span]:
        """Give this span and all spans inside it."""
        yield self
        for span in self.inner:
            yield from span.walk()


@dataclass
class Merged:
    """A merged file: spans and marks by process and row, and the summaries of the ranks."""

    rows: dict[tuple[int, str], list[Span]]
    marks: dict[tuple[int, str], list[tuple[str, int]]]
    ranks: list[dict[str, Any]]
    processes: dict[int, str]

    def tensors(self, rank: int) -> list[Span]:
        """List the spans of a rank's tensors, in the order of their beginnings."""
        return self._tasks(rank + 1, "tensors")

    def negotiations(self) -> list[Span]:
        """List the coordinator's spans of waiting for ranks, in the order of their beginnings."""
        return self._tasks(NEGOTIATION, "negotiations")

    def batches(self, rank: int) -> list[Span]:
        """List the spans of a rank's batches, in the order of their beginnings."""
        return self._spans(rank + 1, "engine")

    def _tasks(self, process: int, category: str) -> list[Span]:
        """List the spans of what is under way beside others, which lie within one of their kind."""
        kinds = self._spans(process, f"{category} ")
        assert all(kind.name == span.args["kind"] for kind in kinds for span in kind.inner)
        return [span for kind in kinds for span in kind.inner]

    def _spans(self, process: int, row: str) -> list[Span]:
        found = [
            span
            for (its_process, name), spans in self.rows.items()
            if its_process == process and name.startswith(row)
            for span in spans
        ]
        return sorted(found, key=lambda span: span.begin)


def nanoseconds(event: dict[str, Any], key: str = "ts") -> int:
    return round(event[key] * 1000)


def read_merged(path: Path) -> Merged:
    """Read a file, and check that it is strict JSON and that the spans of every row nest.

    Raises:
        AssertionError: spans of one row overlap, or a span ends that did not begin.
    """
    whole = json.loads(path.read_text())
    events = whole["traceEvents"]
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    by_row: dict[tuple[int, int], list[dict[str, Any]]] = {}
    by_task: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "ben":
            task = f"{event['cat']} {event['id2']['local']}"
            by_task.setdefault((event["pid"], task), []).append(event)
        elif event["ph"] != "M":
            by_row.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    rows: dict[tuple[int, str], list[Span]] = {}
    marks: dict[tuple[int, str], list[tuple[str, int]]] = {}
    for row, row_events in by_row.items():
        key = (row[0], names[row])
        assert key not in rows, f"two rows are called {key}"
        rows[key], marks[key] = _nest(row_events)
    for key, task_events in by_task.items():
        rows[key], marks[key] = _nest(task_events)
        assert len(rows[key]) == 1, f"{key} has a task beside its first one"
    return Merged(rows, marks, whole["otherData"]["ranks"], processes)


def _nest(events: list[dict[str, Any]]) -> tuple[list[Span], list[tuple[str, int]]]:
    """Make spans of one row's events, which a viewer sorts by time and then by file position."""
    top: list[Span] = []
    marks: list[tuple[str, int]] = []
    open_spans: list[Span] = []
    for event in sorted(events, key=nanoseconds):
        at = nanoseconds(event)
        while open_spans and open_spans[-1].end is not None and open_spans[-1].end <= at:
            open_spans.pop()
        if event["ph"] in "Ee":
            assert open_spans, f"nothing had begun that ends here: {event}"
            span = open_spans.pop()
            assert event.get("name", span.name) == span.name
            assert span.end is None, f"{span.name} had ended before {event}"
            span.end = at
            span.args.update(event.get("args", {}))
        elif event["ph"] in "in":
            marks.append((event["name"], at))
            if open_spans:
                open_spans[-1].marks.append((event["name"], at))
        else:
            span = Span(event["name"], at, args=dict(event.get("args", {})))
            if event["ph"] == "X":
                span.end = at + nanoseconds(event, "dur")
                outer = open_spans[-1].end if open_spans else None
                assert outer is None or span.end <= outer, f"{span.name} outlasts its outer span"
            (open_spans[-1].inner if open_spans else top).append(span)
            open_spans.append(span)
    return top, marks
