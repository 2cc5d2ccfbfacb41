"""Measure what elastic training costs: at the death of a rank, and without a fault.

    python benchmarks/elastic.py --kills 200 --ranks 2 3 4

- `kill`: jobs of the most ranks, of which one after the other gets SIGKILL at a random moment. The
  time is from the kill to the end of the first step that all survivors have made in the new epoch.
  `lost` counts steps that some survivor has not made, `twice` those that one made twice, `wrong`
  sums that are not those of the ranks of their epoch. Workers load no framework.
- `step`: a training step of the models of step.py in an elastic job, divided by the same step in an
  ordinary one; the two kinds of jobs take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from workers import hand_on, machine

BUCKETS = 4
PATIENCE = 30.0  # seconds that a single event may take
STEPS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, metavar="N", help="how many (60)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="before a kill")
    parser.add_argument("--mib", type=float, default=1.0, help="gradients of a step (1)")
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each kind for `step` (3)")
    parser.add_argument("--only", choices=("kill", "step"), help="this part only")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    parser.add_argument("--worker", metavar="PART", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        WORKERS[arguments.worker](arguments)
        return 0
    if arguments.quick:
        arguments.kills, arguments.jobs = 4, 1
    for name, measure in (("kill", measure_kills), ("step", measure_steps)):
        if arguments.only in (None, name):
            for row in measure(arguments):
                full = {"benchmark": f"elastic_{name}", **row, **machine("torch")}
                hand_on(json.dumps(full), arguments.output)
    return 0


# Jobs


@contextmanager
def job(
    flags: Sequence[str], part: str, folder: Path, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job of this file's workers; it is ended with the context."""
    launcher = [sys.executable, "-m", "hvdlite.launch", *flags]
    worker = [sys.executable, __file__, "--worker", part, "--folder", str(folder), *options]
    process = subprocess.Popen(
        [*launcher, *worker],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def until(found: Callable[[], Any], what: str) -> Any:
    """Wait for something true, and return it."""
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {PATIENCE:g} s there is still not {what}")
        time.sleep(0.002)
    return value


@dataclass(frozen=True)
class Line:
    """What a worker has written: what happened, when, and numbers."""

    what: str
    at: float
    numbers: tuple[int, ...]


class Log:
    """What one worker writes, in one write for each line."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"worker.{os.environ['HVDLITE_WORKER']}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.write("pid", os.getpid())

    def write(self, what: str, *numbers: int) -> None:
        """Add a line."""
        os.write(self._fd, f"{what} {time.monotonic()} {' '.join(map(str, numbers))}\n".encode())


def read_log(folder: Path, worker: int) -> list[Line]:
    """Read what a worker has written so far."""
    path = folder / f"worker.{worker}"
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().split("\n")[:-1]]
    return [Line(line[0], float(line[1]), tuple(map(int, line[2:]))) for line in lines]


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Describe times in seconds, in milliseconds."""
    ordered = sorted(1000 * one for one in times)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"p50_ms": round(at(0.5), 1), "p95_ms": round(at(0.95), 1), "max_ms": round(at(1), 1)}


# Kills


def measure_kills(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Kill workers, and return a row for each number of ranks, and one for all."""
    times: dict[int, list[float]] = {ranks: [] for ranks in sorted(arguments.ranks, reverse=True)}
    wrong = {"lost": 0, "twice": 0, "wrong": 0, "steps": 0}
    while sum(map(len, times.values())) < arguments.kills:
        with tempfile.TemporaryDirectory(prefix="hvdlite-benchmark-") as name:
            folder, most = Path(name), max(arguments.ranks)
            flags = ["-np", str(most), "--min-np", "1", "--max-np", str(most)]
            with job(flags, "kill", folder, "--mib", str(arguments.mib)):
                kill_down(folder, most, min(arguments.ranks), times)
            for key, count in judge(folder, most).items():
                wrong[key] += count
    for ranks, own in times.items():
        yield {"ranks": ranks, "kills": len(own), **percentiles(own)}
    every = [one for own in times.values() for one in own]
    yield {
        "ranks": "all",
        "kills": len(every),
        "mib": arguments.mib,
        **percentiles(every),
        **wrong,
    }


def kill_down(folder: Path, most: int, least: int, times: dict[int, list[float]]) -> None:
    """Kill one worker after the other, until fewer than `least` are left."""
    alive = list(range(most))

    def steps_after(worker: int, epoch: int) -> list[Line]:
        lines = read_log(folder, worker)
        return [one for one in lines if one.what == "step" and one.numbers[1] > epoch]

    def until_step(worker: int, epoch: int) -> float:
        until(lambda: steps_after(worker, epoch), "a step after the kill")
        return steps_after(worker, epoch)[0].at

    for ranks in range(most, least - 1, -1):
        until(lambda: all(len(steps_after(one, -1)) > 3 for one in alive), "a step")
        time.sleep(random.uniform(0.02, 0.1))
        victim = alive.pop(random.randrange(len(alive)))
        log = read_log(folder, victim)
        epoch = max(line.numbers[1] for line in log if line.what == "step")
        killed = time.monotonic()
        os.kill(log[0].numbers[0], signal.SIGKILL)
        ends = [until_step(one, epoch) for one in alive]
        if ranks in times:
            times[ranks].append(max(ends) - killed)


def judge(folder: Path, most: int) -> dict[str, int]:
    """Compare the workers' steps: all have made the same ones, once, with right sums."""
    logs = [[one.numbers for one in read_log(folder, n) if one.what == "step"] for n in range(most)]
    lost = twice = wrong = 0
    agreed: dict[int, tuple[int, ...]] = {}
    for log in logs:
        numbers = [step for step, *_ in log]
        twice += len(numbers) - len(set(numbers))
        lost += sum(max(0, after - before - 1) for before, after in pairwise(numbers))
        for line in log:
            wrong += agreed.setdefault(line[0], line) != line
            wrong += line[2] != sum(worker + 1 + line[0] for worker in line[3:])
    return {"lost": lost, "twice": twice, "wrong": wrong, "steps": len(agreed)}


def run_steps(arguments: argparse.Namespace) -> None:
    """Be a worker that makes steps until it is killed."""
    from hvdlite import basics

    basics.init()
    log, step = Log(arguments.folder), 0
    while True:
        make_step(step, arguments.mib, log)
        step += 1


def make_step(step: int, mib: float, log: Log) -> None:
    """Reduce gradients as torch's reducer does, and write down who has made the step."""
    from hvdlite import _core, basics
    from hvdlite.rendezvous import epochs

    def reduce(number: int, cells: array[int]) -> _core.Handle:
        address = cells.buffer_info()[0]
        tensor = _core.Tensor(f"g{number}", _core.DTYPES["int64"], [len(cells)], address, address)
        total = _core.REDUCE_OPS["sum"]
        return basics.engine().allreduce(tensor.name, [tensor], total, keep=cells, transaction="s")

    epochs.begin_step()
    worker = int(os.environ["HVDLITE_WORKER"])
    count = int(mib * (1 << 20) / 8 / BUCKETS)
    buckets = [array("q", [worker + 1 + step]) * count for _ in range(BUCKETS)]
    handles = [reduce(number, cells) for number, cells in enumerate(buckets)]
    commit = basics.engine().commit("c", "s")
    for handle in (*handles, commit):
        handle.wait()
    epochs.commit_step(commit.epoch)
    values = {cells[i] for cells in buckets for i in (0, count // 2, count - 1)}
    value = values.pop() if len(values) == 1 else -1
    log.write("step", step, commit.epoch, value, *epochs.find(commit.epoch).workers)


# Steps without a fault


def measure_steps(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Let ordinary and elastic jobs take turns; return a row for each model."""
    for model in ("transformer", "mlp"):
        quickest: dict[str, list[float]] = {"ordinary": [], "elastic": []}
        for _ in range(arguments.jobs):
            for kind, own in quickest.items():
                flags = ["-np", "2", *(["--min-np", "1"] if kind == "elastic" else [])]
                with tempfile.TemporaryDirectory(prefix="hvdlite-benchmark-") as name:
                    with job(flags, "step", Path(name), "--model", model) as process:
                        process.wait()
                    own.append(max(float(one.read_text()) for one in Path(name).iterdir()))
        ordinary, elastic = (min(own) for own in quickest.values())
        yield {
            "model": model,
            "ranks": 2,
            "jobs": arguments.jobs,
            **{f"{kind}_ms": [round(one, 2) for one in own] for kind, own in quickest.items()},
            "ratio": round(elastic / ordinary, 3),
        }


def run_model(arguments: argparse.Namespace) -> None:
    """Be a rank that trains a model for some steps, and write down the tenth percentile."""
    # Steps that other processes disturb would hide the difference.
    import torch
    from step import Contestant
    from step_models import MODELS

    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    make_model, make_batch = MODELS[arguments.model]
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    contestant = Contestant(model, optimizer, lambda: None)
    times = [contestant.step(make_batch()) for _ in range(5 + STEPS)]
    (arguments.folder / str(hvd.rank())).write_text(str(statistics.quantiles(times[5:], n=10)[0]))
    hvd.shutdown()


WORKERS = {"kill": run_steps, "step": run_model}

if __name__ == "__main__":
    sys.exit(main())
