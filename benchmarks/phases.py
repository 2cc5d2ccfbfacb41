"""Where the time of a call goes: what hvdlite's timeline records, summed up by phase."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hvdlite.torch as hvd

# Rank 0 in a timeline: the row of its engine, and that of the tensors in flight.
RANK_0, ENGINE_ROW = 1, 1
# What a tensor goes through. The last is all of the batch: what the parts do not cover is the
# engine's own work around them.
TENSOR_PHASES = ["queue", "negotiate", "wait for batch", "allreduce"]
BATCH_PARTS = ["pack", "wait for ranks", "reduce", "exchange", "unpack"]


def phases_of(call: Callable[[], float], calls: int, path: Path) -> dict[str, Any]:
    """Measure the phases of a call that has run before, by a timeline; every rank calls this."""
    # `call` does it once, and returns how long it took, in microseconds. No other call of this
    # function gets the same path. On rank 0 the result has medians in microseconds: `call_us` of
    # the call; for each phase that of a tensor, for each part that of a batch; `batches`, how many
    # a call made; and for calls of one tensor `outside_us`, the part of the call in which its
    # tensor was not with the engine. On other ranks it is empty.
    hvd.barrier()
    hvd.start_timeline(str(path))
    times = [call() for _ in range(calls)]
    hvd.stop_timeline()
    hvd.barrier()  # The file is whole when the last rank has stopped.
    if hvd.rank() != 0:
        return {}
    events = json.loads(path.read_text())["traceEvents"]
    spans = durations([event for event in events if event["pid"] == RANK_0])
    medians = {name: round(statistics.median(own), 2) for name, own in spans.items()}
    row: dict[str, Any] = {"call_us": round(statistics.median(times), 2)}
    row["batches"] = len(spans["batch"]) / calls
    if len(spans[TENSOR_PHASES[0]]) == calls:
        inside = sum(medians[phase] for phase in TENSOR_PHASES)
        row["outside_us"] = round(row["call_us"] - inside, 2)
    for phase in TENSOR_PHASES + BATCH_PARTS:
        row[f"{phase.replace(' ', '_')}_us"] = medians.get(phase, 0.0)
    return row


def durations(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return how long each phase, each part and each batch took, in microseconds, by name."""
    took: dict[str, list[float]] = defaultdict(list)
    open_spans: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        row, kind = event["tid"], event["ph"]
        if kind == "X":
            took[event["name"]].append(event["dur"])
        elif kind == "B":
            open_spans[row].append(event)
        elif kind == "E" and open_spans[row]:
            began = open_spans[row].pop()
            name = "batch" if row == ENGINE_ROW else began["name"]
            took[name].append(event["ts"] - began["ts"])
    return took
