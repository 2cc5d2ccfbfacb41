"""The journals of a job's workers, and what they must agree on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass
class Journey:
    """What one worker has written.

    Attributes:
        worker: its number.
        records: its lines.
        steps: the step records that count, by step: without those that it has restored away.
        entered: the steps at which it has entered the training function.
    """

    worker: int
    records: list[Record]
    steps: dict[int, Record] = field(default_factory=dict)
    entered: list[int] = field(default_factory=list)
    restored: int = 0

    def __post_init__(self) -> None:
        for record in self.records:
            if record["kind"] == "restored":
                self.restored += 1
                self.steps = {k: v for k, v in self.steps.items() if k < record["step"]}
            elif record["kind"] == "enter":
                self.entered.append(record["step"])
                self._check_next(record["step"])
            elif record["kind"] == "done":
                assert record["step"] not in self.steps, f"{self} did step {record['step']} twice"
                self._check_next(record["step"])
                self.steps[record["step"]] = record

    def _check_next(self, step: int) -> None:
        expected = max(self.steps) + 1 if self.steps else step
        assert step == expected, f"{self} is at step {step} after step {expected - 1}"

    @property
    def end(self) -> Record | None:
        """What it wrote at its end; None if it did not get there."""
        return next((record for record in self.records if record["kind"] == "end"), None)

    def times(self, kind: str) -> list[float]:
        """Return when it wrote lines of a kind."""
        return [record["at"] for record in self.records if record["kind"] == kind]

    def __str__(self) -> str:
        return f"worker {self.worker}"


def read_journals(folder: Path) -> dict[int, Journey]:
    """Read what the workers of a job have written."""
    journeys = {}
    for path in sorted(folder.glob("worker.*")):
        number = int(path.suffix[1:])
        records = [json.loads(line) for line in path.read_text().splitlines()]
        journeys[number] = Journey(number, records)
    return journeys


def check_core_job(journeys: Mapping[int, Journey], steps: int) -> None:
    """Check that all core workers that came to the end have made the same steps, and all of them.

    Each has checked by itself that its steps were those of the epochs that `history()` tells.
    """
    ends = [(one, one.end) for one in journeys.values() if one.end is not None]
    assert ends, "no worker came to its end"
    known: dict[int, list[int]] = {}
    for journey, end in ends:
        assert max(journey.steps, default=steps - 1) == steps - 1, f"{journey} has lost a step"
        assert end["weights"] == ends[0][1]["weights"], f"{journey} ended with other weights"
        for number, workers in end["history"]:
            assert known.setdefault(number, workers) == workers, f"{journey}: epoch {number}"
            assert journey.worker in workers
