"""The oracle: it reads the journals of a job's workers and replays the training in one process.

A step counts with the workers of the epoch in which its gradients were committed. The oracle checks
that all workers agree on these, that nobody has lost a step or done one twice, and that the weights
after each step are those of the replay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.arithmetic import (
    BUCKETS,
    contribution,
    first_weights,
    updated,
)

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


def agreed_steps(journeys: Mapping[int, Journey]) -> list[Record]:
    """Return the steps of the job; check that the workers agree on each.

    A worker that died may be behind the others, and its records after a restore do not count.
    """
    ends = {number: one for number, one in journeys.items() if one.end is not None}
    assert ends, "no worker came to its end"
    steps = max(max(one.steps, default=-1) for one in ends.values()) + 1
    agreed = []
    for step in range(steps):
        records = {n: one.steps[step] for n, one in ends.items() if step in one.steps}
        if not records:  # Those who made it have died; the state that they left shows it.
            records = {n: one.steps[step] for n, one in journeys.items() if step in one.steps}
        assert records, f"nobody has made step {step}"
        seen = {(r["epoch"], tuple(r["workers"]), str(r["weights"])) for r in records.values()}
        assert len(seen) == 1, f"workers do not agree on step {step}: {seen}"
        record = next(iter(records.values()))
        lost = [n for n in record["workers"] if n in ends and step not in ends[n].steps]
        assert not lost, f"workers {lost} have lost step {step}"
        agreed.append(record)
    numbers = [record["epoch"] for record in agreed]
    assert numbers == sorted(numbers), f"epochs go back: {numbers}"
    return agreed


def check_histories(journeys: Mapping[int, Journey], agreed: list[Record]) -> None:
    """Check that `hvd.elastic.history()` of all workers agree, and explain each step."""
    known: dict[int, tuple[int, ...]] = {}
    for journey in journeys.values():
        for number, workers in (journey.end or {"history": []})["history"]:
            assert known.setdefault(number, tuple(workers)) == tuple(workers)
            assert journey.worker in workers
    for record in agreed:
        if record["epoch"] in known:
            assert known[record["epoch"]] == tuple(record["workers"])


def check_core_job(journeys: Mapping[int, Journey], steps: int) -> None:
    """Check a job of core workers: all agree on its steps, and on the weights of the replay."""
    agreed = agreed_steps(journeys)
    assert len(agreed) == steps, f"{len(agreed)} steps instead of {steps}"
    check_histories(journeys, agreed)
    weights = first_weights()
    for record in agreed:
        step, workers = record["step"], record["workers"]
        totals = [
            sum(contribution(worker, step, bucket, weights[bucket]) for worker in workers)
            for bucket in range(BUCKETS)
        ]
        weights = [updated(w, t, len(workers)) for w, t in zip(weights, totals, strict=True)]
        assert record["weights"] == weights, f"step {step} differs from the replay"
    for journey in journeys.values():
        if journey.end is not None:
            assert journey.end["weights"] == weights, f"{journey} ended with other weights"
