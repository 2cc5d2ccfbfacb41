"""Measure what it costs to watch a job: with a timeline, a live view, or a check of replicas.

    python benchmarks/overhead.py --np 2
    python benchmarks/overhead.py --only live

There is a row for each:

- `timeline`: steps that sum 200 tensors of 12,500 floats; a timeline is begun and ended.
- `live`: the same steps in jobs of their own on a terminal, one of them with `--live`.
- `replicas`: steps of the transformer of step_models.py, one of them with a DistributedOptimizer
  that was made under HVDLITE_CHECK_REPLICAS=100; a turn has 100 steps, of which one compares.

In each turn steps are measured without it ("off"), with it ("on"), and without it again
("off_again"). `_ms` is the median of the turns' mean times of a step on the slowest rank,
`on_to_off` the median of the turns' ratios, and `noise` that of "off_again" to "off".
`launcher_cpu`, of a live view, is how much of a core the launcher used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import PREFIXED_ROW, add_common_arguments, hand_on, machine, print_row, run_ranks

TENSORS, FLOATS = 200, 12_500
CHECK_STEPS = 100
TURNS, SECONDS = 7, 2.0  # of each way in a turn
WAYS = ("off", "on", "off_again")
PARTS = ("timeline", "live", "replicas")
Call = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--only", choices=PARTS, help="this part only")
    arguments = parser.parse_args()
    if arguments.worker:
        RANKS[arguments.only](arguments.quick)
        return 0
    for part in [arguments.only] if arguments.only else PARTS:
        if part == "live":
            measure_live(arguments)
            continue
        passed_on = ["--only", part, *["--quick"] * arguments.quick]
        status = run_ranks(__file__, arguments.np, arguments.output, passed_on)
        if status != 0:
            return status
    return 0


def row_of(what: str, ranks: int, turns: list[dict[str, float]]) -> dict[str, Any]:
    """Make a row from the seconds of a step, by way and turn."""
    row: dict[str, Any] = {"benchmark": "overhead", "what": what, "np": ranks, "turns": len(turns)}
    for way in WAYS:
        row[f"{way}_ms"] = round(1e3 * statistics.median(turn[way] for turn in turns), 3)
    for name, way in (("on_to_off", "on"), ("noise", "off_again")):
        row[name] = round(statistics.median(turn[way] / turn["off"] for turn in turns), 4)
    return row


def step_of_many() -> Call:
    """Return a step that sums many tensors."""
    import torch

    import hvdlite.torch as hvd

    gradients = [torch.zeros(FLOATS) for _ in range(TENSORS)]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(gradient, name=f"gradient.{i}")
            for i, gradient in enumerate(gradients)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def mean_time(step: Call, count: int) -> float:
    """Return the mean seconds of a step on the slowest rank; every rank calls it."""
    import torch

    import hvdlite.torch as hvd

    step()  # This one is not measured, because what was before affects it.
    hvd.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    own = torch.tensor((time.perf_counter() - begun) / count, dtype=torch.float64)
    return float(hvd.allreduce(own, op=hvd.Max, name="overhead.mean"))


def begin() -> Any:
    """Become a rank with one thread; return hvdlite.torch."""
    import torch

    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    return hvd


def steps_within(step: Call, seconds: float) -> int:
    """Return how many steps fit into so many seconds, on the slowest rank."""
    mean_time(step, 5)  # It fills caches.
    return max(1, int(seconds / mean_time(step, 10)))


def measure_timeline(quick: bool) -> None:
    """Run one rank of the part `timeline`, and print the row on rank 0."""
    hvd, step = begin(), step_of_many()
    count = steps_within(step, 0.05 if quick else SECONDS)
    turns = []
    with tempfile.TemporaryDirectory() as own:
        path = Path(hvd.broadcast_object(own, root_rank=0)) / "timeline.json"
        for _ in range(1 if quick else TURNS):
            turn = {"off": mean_time(step, count)}
            hvd.start_timeline(path)
            turn["on"] = mean_time(step, count)
            hvd.stop_timeline()
            turn["off_again"] = mean_time(step, count)
            turns.append(turn)
        hvd.barrier()  # A rank may still be merging the parts.
    if hvd.rank() == 0:
        print_row(row_of("timeline", hvd.size(), turns))
    hvd.shutdown()


def measure_replicas(quick: bool) -> None:
    """Run one rank of the part `replicas`, and print the row on rank 0."""
    import torch
    from step import Contestant
    from step_models import MODELS

    hvd = begin()
    make_model, make_batch = MODELS["transformer"]

    def step_of(every: int) -> Call:
        torch.manual_seed(0)
        model = make_model()
        os.environ["HVDLITE_CHECK_REPLICAS"] = str(every)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        contestant, batch = Contestant(model, optimizer, lambda: None), make_batch()
        return lambda: contestant.step(batch)

    off, on = step_of(0), step_of(CHECK_STEPS)
    steps = {"off": off, "on": on, "off_again": off}
    count = 2 if quick else CHECK_STEPS - 1  # `mean_time` makes one more.
    turns = [
        {way: mean_time(step, count) for way, step in steps.items()}
        for _ in range(1 if quick else TURNS)
    ]
    if hvd.rank() == 0:
        print_row(row_of("replicas", hvd.size(), turns))
    hvd.shutdown()


# A live view


def measure_live(arguments: argparse.Namespace) -> None:
    """Run the jobs, and print the row."""
    turns = [
        {way: run_job(way, arguments.np, arguments.quick) for way in WAYS}
        for _ in range(1 if arguments.quick else TURNS)
    ]
    row = row_of(
        "live", arguments.np, [{way: one["step"] for way, one in t.items()} for t in turns]
    )
    row["launcher_cpu"] = round(statistics.median(turn["on"]["launcher_cpu"] for turn in turns), 4)
    hand_on(json.dumps({**row, **machine("torch")}), arguments.output)


def run_job(way: str, ranks: int, quick: bool) -> dict[str, float]:
    """Run one job with a terminal as stderr; return what rank 0 has measured."""
    flags = ["--live"] if way == "on" else []
    worker = [sys.executable, __file__, "--worker", "--only", "live", *["--quick"] * quick]
    master, slave = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "hvdlite.launch", *flags, "-np", str(ranks), *worker],
        env=dict(os.environ, OMP_NUM_THREADS="1", TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    reader = threading.Thread(target=drain, args=(master,))
    reader.start()
    output, _ = job.communicate()
    reader.join()
    found = next(filter(None, map(PREFIXED_ROW.match, output.splitlines())), None)
    if found is None:
        raise SystemExit(f"the job ended with status {job.returncode} and without a result")
    result: dict[str, float] = json.loads(found[1])
    return result


def drain(master: int) -> None:
    """Read a terminal to its end."""
    with contextlib.suppress(OSError):  # It has no writer any more.
        while os.read(master, 1 << 16):
            pass
    os.close(master)


def run_live_rank(quick: bool) -> None:
    """Run one rank; rank 0 prints the mean time of a step."""
    hvd, step = begin(), step_of_many()
    count = steps_within(step, 0.5 if quick else 4 * SECONDS)
    launcher = Path(f"/proc/{os.getppid()}/stat")
    cpu, begun = cpu_seconds(launcher), time.monotonic()
    mean = mean_time(step, count)
    if hvd.rank() == 0:
        used = (cpu_seconds(launcher) - cpu) / (time.monotonic() - begun)
        print(json.dumps({"step": mean, "launcher_cpu": used}), flush=True)
    hvd.shutdown()


def cpu_seconds(stat: Path) -> float:
    """Return the CPU time of a process from its /proc/PID/stat."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


RANKS = {"timeline": measure_timeline, "live": run_live_rank, "replicas": measure_replicas}


if __name__ == "__main__":
    sys.exit(main())
