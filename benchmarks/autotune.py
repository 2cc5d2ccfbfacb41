"""Measure which values autotune finds for a training step on this machine, and how long it takes.

    python benchmarks/autotune.py --np 2

Each rank trains a model of benchmarks/step.py with hvd.DistributedOptimizer, in one thread, until
autotune's search is over. The row is the last line of autotune's log, with the steps and the
seconds that the search took, and the rates of its final check, if there was one. docs/autotune.md
explains the fields.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step import Contestant
from step_models import MODELS
from workers import add_common_arguments, print_row, run_ranks

STEPS_PER_LOOK = 20
QUICK_STEPS_PER_LOOK = 5
QUICK = {"WARMUP_SAMPLES": "1", "STEPS_PER_SAMPLE": "2", "TRIALS": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--model", choices=MODELS, default="mlp", help="which one (mlp)")
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.model, QUICK_STEPS_PER_LOOK if arguments.quick else STEPS_PER_LOOK)
        return 0
    for name, value in QUICK.items() if arguments.quick else ():
        os.environ[f"HVDLITE_AUTOTUNE_{name}"] = value
    with tempfile.TemporaryDirectory(prefix="hvdlite-benchmark-") as folder:
        os.environ["HVDLITE_AUTOTUNE"] = "1"
        os.environ["HVDLITE_AUTOTUNE_LOG"] = f"{folder}/autotune.jsonl"
        passed_on = ["--model", arguments.model, *["--quick"] * arguments.quick]
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)


def measure(name: str, steps_per_look: int) -> None:
    """Run one rank: train until the log has its result, and print it on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    make_model, make_batch = MODELS[name]
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    contestant = Contestant(model, optimizer, lambda: None)
    log = Path(os.environ["HVDLITE_AUTOTUNE_LOG"])
    begin, steps = time.perf_counter(), 0
    rows: list[dict[str, Any]] = []
    while not hvd.broadcast_object(rows, 0):
        for _ in range(steps_per_look):
            contestant.step(make_batch())
        steps += steps_per_look
        if hvd.rank() == 0:
            rows = finished_rows(log)
    if hvd.rank() == 0:
        seconds = round(time.perf_counter() - begin, 1)
        print_row(row_of(name, hvd.size(), rows) | {"training_steps": steps, "seconds": seconds})
    hvd.shutdown()


def finished_rows(log: Path) -> list[dict[str, Any]]:
    """Read autotune's log; return no rows while the search goes on."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return rows if rows and rows[-1]["event"] == "result" else []


def row_of(model: str, ranks: int, rows: list[dict[str, Any]]) -> dict[str, object]:
    """Make the row from the lines of the log."""
    checks = [row["bytes_per_second"] for row in rows if row.get("phase") == "check"]
    result = {name: value for name, value in rows[-1].items() if name != "event"}
    return {"benchmark": "autotune", "model": model, "np": ranks, **result, "check_rates": checks}


if __name__ == "__main__":
    sys.exit(main())
