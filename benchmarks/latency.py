"""Measure what a small all-reduce costs, beside torch's gloo in the same run.

    python benchmarks/latency.py --np 2 > latency.jsonl

One kind of row is a blocking all-reduce of one size, after a pause in which the caller sleeps, as a
training step would compute. The other kind is 222 tensors of 4 KiB: one by one, all in flight
before the first is waited for, or in one group, for which gloo has them in flight. The contestants
take turns in short rounds, with one thread per rank:

- `hvdlite`: the functions of hvdlite.torch.
- `without_fast_path`: the same, with the fast path off.
- `core`, of single tensors: the engine's method, called with a tensor that is described already.
- `gloo`: torch.distributed.all_reduce.

`_us` is the median time on the slowest rank, of a call or of all 222 tensors, `_best_us` the
shortest time, and `_cpu_us` the processor time of all threads of a process, on the rank with the
most.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as gloo
from turns import Call, costs_of, join_gloo
from workers import add_common_arguments, print_row, run_ranks

import hvdlite.torch as hvd
from hvdlite import _core, basics
from hvdlite.torch.collectives.tensors import spec

KIB = 1024
SIZES = [4, 4 * KIB, 16 * KIB]
PAUSES_MS = [0, 0.5, 5]
TENSORS, BYTES_EACH = 222, 4 * KIB
ROUNDS = 12
SECONDS = 0.1  # Each contestant runs so long in each round.
MOST_CALLS = 200


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
        named = zip(tensors, names, strict=True)
        started = [hvd.allreduce_async_(one, op=hvd.Sum, name=name) for one, name in named]
        for handle in started:
            hvd.synchronize(handle)

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


def without_fast_path(call: Call) -> Call:
    """Return the same call with the fast path off."""

    def shut() -> object:
        _core.fast_path.switch(on=False)
        try:
            return call()
        finally:
            _core.fast_path.switch(on=True)

    return shut


def tell(row: dict[str, Any], calls: dict[str, Call], quick: bool, pause: float) -> None:
    """Let the contestants take turns, and print their figures on rank 0."""
    rounds, seconds = (2, SECONDS / 10) if quick else (ROUNDS, SECONDS)
    costs = costs_of(calls, rounds, seconds, pause, MOST_CALLS)
    if hvd.rank() != 0:
        return
    row = {"benchmark": "latency", "np": hvd.size(), **row}
    for name, cost in costs.items():
        row |= {f"{name}_{figure}": round(value, 1) for figure, value in cost._asdict().items()}
    ours = costs["hvdlite"].us
    row["faster_than_without_fast_path"] = round(costs["without_fast_path"].us / ours, 2)
    row["faster_than_gloo"] = round(costs["gloo"].us / ours, 2)
    print_row(row)


if __name__ == "__main__":
    sys.exit(main())
