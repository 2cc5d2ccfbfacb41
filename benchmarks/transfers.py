"""Measure the time that a tensor takes from one rank to another, beside gloo's.

    python benchmarks/transfers.py

Two ranks send a tensor to and from each other by hvd.send and hvd.recv, and by the send and recv of
torch.distributed over gloo, in turns. `one_way_us` is half of the median of such a round, and
`gloo_us` likewise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from workers import add_common_arguments, print_row, run_ranks

KIB = 1024
SIZES = [KIB, 64 * KIB, 4 * KIB * KIB, 64 * KIB * KIB]
QUICK_SIZES = [KIB, 64 * KIB]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.store, arguments.quick)
        return 0
    return run_ranks(__file__, 2, arguments.output, ["--quick"] * arguments.quick)


def measure(store: str, quick: bool) -> None:
    """Run as one rank."""
    import torch
    from gloo_ranks import gloo, join_gloo

    import hvdlite.torch as hvd

    hvd.init()
    rank = hvd.rank()
    join_gloo(store, rank, hvd.size())

    def with_hvdlite(tensor: torch.Tensor) -> None:
        for sender in (0, 1):
            verb = hvd.send if rank == sender else hvd.recv
            verb(tensor, 1 - rank, name="ball")

    def with_gloo(tensor: torch.Tensor) -> None:
        for sender in (0, 1):
            verb = gloo.send if rank == sender else gloo.recv
            verb(tensor, 1 - rank)

    for size in QUICK_SIZES if quick else SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8)
        rounds = 5 if quick else max(10, min(400, (256 << 20) // size))
        ours, theirs = alternate([with_hvdlite, with_gloo], tensor, rounds, gloo.barrier)
        if rank == 0:
            row = {
                "benchmark": "transfers",
                "bytes": size,
                "one_way_us": round(ours / 2, 1),
                "gloo_us": round(theirs / 2, 1),
                "faster_than_gloo": round(theirs / ours, 2),
            }
            print_row(row, "torch")
    hvd.shutdown()


def alternate(
    contestants: list[Callable[..., None]], tensor: object, rounds: int, meet: Callable[[], object]
) -> list[float]:
    """Return the median microseconds of a round of each; they take turns in blocks of ten."""
    times: list[list[float]] = [[] for _ in contestants]
    for block in range(max(1, rounds // 10) + 1):
        for call, own in zip(contestants, times, strict=True):
            meet()
            for _ in range(10):
                begin = time.perf_counter_ns()
                call(tensor)
                if block > 0:
                    own.append((time.perf_counter_ns() - begin) / 1e3)
    return [statistics.median(own) for own in times]


if __name__ == "__main__":
    sys.exit(main())
