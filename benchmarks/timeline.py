"""Measure what a timeline costs: the same collectives with and without one, in turns.

    python benchmarks/timeline.py --np 2

For each kind of work it prints one JSON line, with the median time of one round without a timeline
("off"), with one ("on"), and without one again ("off_again"). The ratio of the last to the first
shows how much noise there is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workers import add_common_arguments, print_row, run_ranks

WORK = {"4 B": (1, 1), "200 x 4 KiB": (200, 1 << 10), "16 MiB": (1, 4 << 20)}  # tensors, floats
TURNS, QUICK_TURNS = 20, 2
SECONDS_PER_TURN, QUICK_SECONDS_PER_TURN = 0.2, 0.02
WAYS = ("off", "on", "off_again")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    measure_all(arguments.quick)
    return 0


def measure_all(quick: bool) -> None:
    """Run one rank: measure every kind of work, and print the rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    for name, (tensors, floats) in WORK.items():
        values = [torch.zeros(floats) for _ in range(tensors)]

        def work(values: list[torch.Tensor] = values, name: str = name) -> None:
            handles = [
                hvd.allreduce_async_(value, op=hvd.Sum, name=f"{name}.{i}")
                for i, value in enumerate(values)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        with tempfile.TemporaryDirectory() as own:
            folder = hvd.broadcast_object(own, root_rank=0)
            row = measure(work, Path(folder) / "timeline.json", quick)
            hvd.barrier()  # A rank may still be merging the parts.
        if hvd.rank() == 0:
            print_row({"benchmark": "timeline", "np": hvd.size(), "work": name, **row})
    hvd.shutdown()


def measure(work: Callable[[], None], path: Path, quick: bool) -> dict[str, float]:
    """Let the ways take turns; return the median of each in microseconds, and ratios."""
    import hvdlite.torch as hvd

    seconds = QUICK_SECONDS_PER_TURN if quick else SECONDS_PER_TURN
    rounds = hvd.broadcast_object(rounds_within(work, seconds), root_rank=0)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(QUICK_TURNS if quick else TURNS):
        for way in WAYS:
            if way == "on":
                hvd.start_timeline(path)
            hvd.barrier()
            work()
            samples[way] += [timed(work) for _ in range(rounds)]
            hvd.barrier()
            if way == "on":
                hvd.stop_timeline()
    figures = {way: statistics.median(samples[way]) for way in WAYS}
    return {
        **{f"{way}_us": round(figure, 2) for way, figure in figures.items()},
        "on_to_off": round(figures["on"] / figures["off"], 3),
        "noise": round(figures["off_again"] / figures["off"], 3),
    }


def rounds_within(work: Callable[[], None], seconds: float) -> int:
    """Return how many rounds fit into so many seconds."""
    took = min(timed(work) for _ in range(3))
    return max(2, min(5000, int(seconds * 1e6 / took)))


def timed(work: Callable[[], None]) -> float:
    """Time one round in microseconds."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e3


if __name__ == "__main__":
    sys.exit(main())
