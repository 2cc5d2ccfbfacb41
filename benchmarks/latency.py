"""Measure what a small all-reduce costs, beside torch's gloo in the same run.

    python benchmarks/latency.py --np 2 > latency.jsonl

One kind of row is a blocking all-reduce of one size, after a pause in which the caller sleeps, as a
training step would compute. The other kind is 222 tensors of 4 KiB: one by one, all in flight
before the first is waited for, or in one group, for which gloo has them in flight. The contestants
take turns in short rounds, with one thread per rank:

- `hvdlite`: the functions of hvdlite.torch.
- `without_fast_path`: the same, with the fast path off (hvdlite.torch.collectives.fast_path).
- `core`, of single tensors: the engine's method, called with a tensor that is described already.
- `gloo`: torch.distributed.all_reduce.

`_us` is the median time on the slowest rank, of a call or of all 222 tensors, `_best_us` the
shortest time, and `_switches` how often the threads of a process were switched per call, on the
rank with the most.

The last rows say where the time of hvdlite's calls goes, on rank 0 (phases.py): `outside_us` is
Python, the binding and the way back to the caller, and then come the phases and parts that
docs/timeline.md explains. Recording them makes a call 2 to 3 us longer.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as gloo
from gloo_ranks import join_gloo, slowest
from phases import phases_of
from workers import add_common_arguments, print_row, run_ranks

import hvdlite.torch as hvd
from hvdlite import _core, basics
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.tensors import spec

KIB = 1024
SIZES = [4, 4 * KIB, 16 * KIB]
PAUSES_MS = [0, 0.5, 5]
TENSORS, BYTES_EACH = 222, 4 * KIB
ROUNDS = 12
SECONDS = 0.1  # Each contestant runs so long in each round.
MOST_CALLS = 200

Call = Callable[[], object]


class Figures(NamedTuple):
    """What the calls of one contestant took."""

    us: float
    best_us: float
    switches: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.worker:
        return run_ranks(__file__, arguments.np, arguments.output, ["--quick"] * arguments.quick)
    torch.set_num_threads(1)
    hvd.init()
    join_gloo(arguments.store, hvd.rank(), hvd.size())
    measure_sizes(arguments.quick)
    measure_many(arguments.quick)
    measure_phases(Path(arguments.store).parent, arguments.quick)
    gloo.destroy_process_group()
    hvd.shutdown()
    return 0


def measure_sizes(quick: bool) -> None:
    """Print the rows of single tensors."""
    for size in SIZES[:2] if quick else SIZES:
        calls = single_calls(torch.zeros(size // 4))
        for pause in PAUSES_MS[:2] if quick else PAUSES_MS:
            tell({"bytes": size, "tensors": 1, "pause_ms": pause}, calls, quick, pause / 1e3)


def single_calls(tensor: torch.Tensor) -> dict[str, Call]:
    """Return, by contestant, a call that sums the tensor."""
    name = f"latency.{tensor.nbytes}"
    described = [spec(name, tensor, tensor)]
    engine = basics.engine()
    total = _core.REDUCE_OPS["sum"]

    def ours() -> object:
        return hvd.allreduce_(tensor, op=hvd.Sum, name=name)

    return {
        "hvdlite": ours,
        "without_fast_path": without_fast_path(ours),
        "core": lambda: engine.allreduce(name, described, total, blocking=True).wait(),
        "gloo": lambda: gloo.all_reduce(tensor),
    }


def measure_many(quick: bool) -> None:
    """Print the rows of 222 tensors."""
    tensors = [torch.zeros(BYTES_EACH // 4) for _ in range(TENSORS)]
    names = [f"latency.many.{i}" for i in range(TENSORS)]

    def one_by_one() -> None:
        for tensor, name in zip(tensors, names, strict=True):
            hvd.allreduce_(tensor, op=hvd.Sum, name=name)

    def in_flight() -> None:
        sum_in_flight(tensors, names)

    def grouped() -> None:
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="latency.group")

    def gloo_one_by_one() -> None:
        for tensor in tensors:
            gloo.all_reduce(tensor)

    def gloo_in_flight() -> None:
        for work in [gloo.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    ways: dict[str, tuple[Call, Call]] = {
        "one by one": (one_by_one, gloo_one_by_one),
        "in flight": (in_flight, gloo_in_flight),
        "grouped": (grouped, gloo_in_flight),
    }
    for way, (ours, theirs) in ways.items():
        calls = {"hvdlite": ours, "without_fast_path": without_fast_path(ours), "gloo": theirs}
        tell({"bytes": BYTES_EACH, "tensors": TENSORS, "way": way}, calls, quick, 0)


def sum_in_flight(tensors: list[torch.Tensor], names: list[str]) -> None:
    """Start the sums of all tensors, then wait for them."""
    named = zip(tensors, names, strict=True)
    started = [hvd.allreduce_async_(one, op=hvd.Sum, name=name) for one, name in named]
    for handle in started:
        hvd.synchronize(handle)


def measure_phases(folder: Path, quick: bool) -> None:
    """Print the rows that say where the time of a call goes."""
    for size in SIZES[:2]:
        tensor = torch.zeros(size // 4)
        call: Call = partial(hvd.allreduce_, tensor, op=hvd.Sum, name=f"latency.{size}")
        for pause in [0, PAUSES_MS[-1]]:
            row = {"bytes": size, "tensors": 1, "pause_ms": pause}
            path = folder / f"timeline_{size}_{pause}.json"
            tell_phases(row, call, 20 if quick else MOST_CALLS, pause / 1e3, path)
    tensors = [torch.zeros(BYTES_EACH // 4) for _ in range(TENSORS)]
    names = [f"latency.many.{i}" for i in range(TENSORS)]
    many = {"bytes": BYTES_EACH, "tensors": TENSORS, "way": "in flight"}
    call = partial(sum_in_flight, tensors, names)
    tell_phases(many, call, 5 if quick else 50, 0, folder / "timeline_many.json")


def tell_phases(row: dict[str, Any], call: Call, calls: int, pause: float, path: Path) -> None:
    """Measure the phases of a call, and print them on rank 0."""

    def once() -> float:
        if pause:
            time.sleep(pause)
        return timed(call)

    for _ in range(3):
        once()  # Nothing is new then in what is measured.
    phases = phases_of(once, calls, path)
    if hvd.rank() == 0:
        print_row({"benchmark": "latency_phases", "np": hvd.size(), **row, **phases})


def without_fast_path(call: Call) -> Call:
    """Return the same call with the fast path off."""

    def shut() -> object:
        with fast_path.off():
            return call()

    return shut


def tell(row: dict[str, Any], calls: dict[str, Call], quick: bool, pause: float) -> None:
    """Let the contestants take turns, and print their figures on rank 0."""
    figures = measure(calls, 2 if quick else ROUNDS, SECONDS / 10 if quick else SECONDS, pause)
    if hvd.rank() != 0:
        return
    row = {"benchmark": "latency", "np": hvd.size(), **row}
    for name, one in figures.items():
        row[f"{name}_us"] = round(one.us, 1)
        row[f"{name}_best_us"] = round(one.best_us, 1)
        row[f"{name}_switches"] = round(one.switches, 1)
    row["faster_than_without_fast_path"] = round(
        figures["without_fast_path"].us / figures["hvdlite"].us, 2
    )
    row["faster_than_gloo"] = round(figures["gloo"].us / figures["hvdlite"].us, 2)
    print_row(row)


def measure(
    calls: dict[str, Call], rounds: int, seconds: float, pause: float
) -> dict[str, Figures]:
    """Return the figures of each contestant, on the rank where they are worst."""
    repeats = {name: repeats_within(call, seconds, pause) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    switched = dict.fromkeys(calls, 0)
    for _ in range(rounds):
        for name, call in calls.items():
            gloo.barrier()
            call()  # This one is not measured, because the turn before affects it.
            for _ in range(repeats[name]):
                time.sleep(pause) if pause else None
                before = switches()
                times[name].append(timed(call))
                switched[name] += switches() - before
    return {
        name: Figures(*slowest([statistics.median(own), min(own), switched[name] / len(own)]))
        for name, own in times.items()
    }


def repeats_within(call: Call, seconds: float, pause: float) -> int:
    """Return how often `call` fits into so many seconds; all ranks get the same number."""
    gloo.barrier()
    expected = slowest([statistics.median(timed(call) for _ in range(3))])[0] / 1e6
    return max(2, min(MOST_CALLS, int(seconds / max(expected + pause, 1e-6))))


def timed(call: Call) -> float:
    """Time one call in microseconds."""
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def switches() -> int:
    """Return how often the threads of this process were switched so far, of themselves or not."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


if __name__ == "__main__":
    sys.exit(main())
