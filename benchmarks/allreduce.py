"""Measure a blocking all-reduce, beside memcpy and torch's gloo in the same run.

    python benchmarks/allreduce.py --np 2 > allreduce.jsonl

Each row is one size. The tensor is an ordinary one of float32, which is summed in place, with one
thread per rank. The contestants take turns (turns.py):

- `hvdlite`: hvd.allreduce_.
- `memcpy`: every rank copies a private buffer of that size, all at the same time; the yardstick.
- `gloo`: torch.distributed.all_reduce.
- `gradients`, with --gradients: hvd.allreduce_ of a tensor in the memory that the ranks of a host
  share, as the gradients of a DistributedOptimizer with gradient_as_bucket_view=True are.
- `fp16`, with --fp16: hvd.allreduce with Compression.fp16, which casts in the core.
- `fp16_by_hand`, with --fp16: the same, but torch casts before and after.

A figure is the median over all rounds on the slowest rank, in microseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable

import torch
import torch.distributed as gloo
from turns import Call, costs_of, join_gloo
from workers import add_common_arguments, print_row, run_ranks

SIZES = [4, 64, 512, *(1 << exponent for exponent in range(11, 29))]
QUICK_SIZES = [4, 4 << 10, 1 << 20]
SECONDS_PER_SIZE = 6.0
QUICK_SECONDS_PER_SIZE = 0.3
ROUNDS = 12
QUICK_ROUNDS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--sizes", help="comma-separated sizes in bytes instead of the usual ones")
    parser.add_argument("--fp16", action="store_true", help="also cast to float16 on the way")
    parser.add_argument("--gradients", action="store_true", help="also in memory that ranks share")
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick + ["--fp16"] * arguments.fp16
        passed_on += ["--gradients"] * arguments.gradients
        if arguments.sizes:
            passed_on += ["--sizes", arguments.sizes]
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    measure_all(arguments)
    return 0


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: measure every size, and print the rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    join_gloo(arguments.store, hvd.rank(), hvd.size())
    sizes = QUICK_SIZES if arguments.quick else SIZES
    if arguments.sizes:
        sizes = [int(size) for size in arguments.sizes.split(",")]
    for size in sizes:
        tensor = torch.zeros(size // 4).fill_(0.0)
        contestants = contestants_for(tensor, hvd.allreduce_, hvd.Sum)
        if arguments.fp16:
            contestants |= casting_contestants_for(tensor)
        if arguments.gradients:
            contestants |= gradients_for(size)
        rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
        seconds = QUICK_SECONDS_PER_SIZE if arguments.quick else SECONDS_PER_SIZE
        costs = costs_of(contestants, rounds, seconds / rounds / len(contestants))
        figures = {name: cost.us for name, cost in costs.items()}
        if hvd.rank() == 0:
            print_row(row_of(size, hvd.size(), figures))
    gloo.destroy_process_group()
    hvd.shutdown()


def contestants_for(
    tensor: torch.Tensor, allreduce_: Callable[..., torch.Tensor], total: int
) -> dict[str, Call]:
    """Return, by contestant, a call that works on the same tensor."""
    size = tensor.numel() * tensor.element_size()
    copy = torch.empty_like(tensor).fill_(0.0)
    source, target = tensor.data_ptr(), copy.data_ptr()
    name = f"benchmark.{size}"
    return {
        "hvdlite": lambda: allreduce_(tensor, op=total, name=name),
        "memcpy": lambda: ctypes.memmove(target, source, copy.nbytes),
        "gloo": lambda: gloo.all_reduce(tensor),
    }


def gradients_for(size: int) -> dict[str, Call]:
    """Return, by contestant, a call that works on a tensor in gradient memory."""
    import hvdlite.torch as hvd
    from hvdlite import basics

    memory = basics.engine().lend_gradient_memory(size)
    if memory is None:
        raise SystemExit("there is no room for gradient memory: see HVDLITE_SHM_GRADIENTS")
    tensor = torch.frombuffer(memory, dtype=torch.float32).fill_(0.0)
    name = f"benchmark.gradients.{size}"
    return {"gradients": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name)}


def casting_contestants_for(tensor: torch.Tensor) -> dict[str, Call]:
    """Return, by contestant, a call that reduces the tensor as float16."""
    import hvdlite.torch as hvd

    size = tensor.numel() * tensor.element_size()
    how = {"op": hvd.Sum, "name": f"benchmark.fp16.{size}"}
    return {
        "fp16": lambda: hvd.allreduce(tensor, compression=hvd.Compression.fp16, **how),
        "fp16_by_hand": lambda: hvd.allreduce(tensor.half(), **how).float(),
    }


def row_of(size: int, ranks: int, figures: dict[str, float]) -> dict[str, object]:
    """Make the row, with times and ratios."""
    ours = figures["hvdlite"]
    others = set(figures) - {"hvdlite", "memcpy", "gloo"}
    asked = {f"{name}_us": round(figures[name], 2) for name in figures if name in others}
    if "gradients" in figures:
        asked["gradients_ratio"] = round(figures["gradients"] / ours, 2)
    # Above 1, `times_memcpy` means that hvdlite is slower than memcpy, and `faster_than_gloo` that
    # it is faster than gloo.
    return {
        "benchmark": "allreduce",
        "np": ranks,
        "bytes": size,
        "hvdlite_us": round(ours, 2),
        "memcpy_us": round(figures["memcpy"], 2),
        "gloo_us": round(figures["gloo"], 2),
        "hvdlite_gb_per_s": round(size / ours / 1e3, 3),
        "times_memcpy": round(ours / figures["memcpy"], 2),
        "faster_than_gloo": round(figures["gloo"] / ours, 2),
        **asked,
    }


if __name__ == "__main__":
    sys.exit(main())
