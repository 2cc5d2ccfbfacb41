"""Measure torch.distributed over the backend hvdlite, beside gloo in the same run.

    python benchmarks/c10d.py --np 2 > c10d.jsonl

There is a row for each collective and size, and one for each way of training a model of 25 M
parameters. The contestants take turns in short rounds in the same processes, with one thread per
rank:

- `hvdlite`: torch.distributed's function with a group of the backend hvdlite.
- `gloo`: the same with gloo.
- `plain`, of all-reduce: hvd.allreduce_, without torch.distributed.
- `compute`, of training: the model alone, with a barrier where the others communicate.
- `unsent`, of ddp: DistributedDataParallel that copies gradients into buckets and back, and has a
  barrier where the others send the buckets.

`_us` is the median wall time of a call on the slowest rank, and `_cpu_us` the processor time of a
call, with all threads of the process, on the rank that needs most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import join_gloo, slowest
from step_models import make_mlp, mlp_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import add_common_arguments, print_row, run_ranks

SIZES = [4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK_SIZES = [4, 1 << 20]
SECONDS = 2.0
ROUNDS = 8

Call = Callable[[], object]

# Their names since torch 2.13, and before.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--only", help="comma-separated collectives, or ddp, fsdp")
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick
        passed_on += ["--only", arguments.only] if arguments.only else []
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    measure_all(arguments)
    return 0


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: measure everything, and print the rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    join_gloo(arguments.store, hvd.rank(), hvd.size())
    groups = {"hvdlite": dist.new_group(backend="hvdlite"), "gloo": dist.group.WORLD}
    wanted = arguments.only.split(",") if arguments.only else [*COLLECTIVES, *MODELS]
    for name in wanted:
        if name in COLLECTIVES:
            for size in QUICK_SIZES if arguments.quick else SIZES:
                calls = {key: COLLECTIVES[name](size, group) for key, group in groups.items()}
                if name == "all_reduce":
                    calls["plain"] = plain(size, hvd)
                tell({"collective": name, "bytes": size}, calls, arguments.quick)
        else:
            models = {key: MODELS[name](group) for key, group in groups.items()}
            models["compute"] = alone()
            if name == "ddp":
                models["unsent"] = unsent(groups["hvdlite"])
            tell({"model": name}, models, arguments.quick)
    dist.destroy_process_group()
    hvd.shutdown()


def tell(row: dict[str, Any], calls: dict[str, Call], quick: bool) -> None:
    """Measure the contestants, and print a row."""
    wall, cpu = measure(calls, quick)
    if dist.get_rank() != 0:
        return
    figures: dict[str, Any] = {}
    for key in calls:
        figures[f"{key}_us"] = round(wall[key], 1)
        figures[f"{key}_cpu_us"] = round(cpu[key], 1)
    figures["faster_than_gloo"] = round(wall["gloo"] / wall["hvdlite"], 2)
    if "plain" in calls:
        figures["cpu_times_plain"] = round(cpu["hvdlite"] / cpu["plain"], 2)
    if "unsent" in calls:
        sent = {key: wall[key] - wall["unsent"] for key in ("hvdlite", "gloo")}
        figures["sending_to_gloos"] = round(sent["hvdlite"] / max(sent["gloo"], 1.0), 2)
    if "compute" in calls:
        added = {key: wall[key] - wall["compute"] for key in ("hvdlite", "gloo")}
        figures["added_to_gloos"] = round(added["hvdlite"] / max(added["gloo"], 1.0), 2)
        added = {key: cpu[key] - cpu["compute"] for key in ("hvdlite", "gloo")}
        figures["cpu_added_to_gloos"] = round(added["hvdlite"] / max(added["gloo"], 1.0), 2)
    print_row({"benchmark": "c10d", "np": dist.get_world_size(), **row, **figures})


def measure(calls: dict[str, Call], quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Let the contestants take turns; return wall and processor time of a call in microseconds."""
    rounds, budget = (1, 0.05) if quick else (ROUNDS, SECONDS / ROUNDS / len(calls))
    repeats = {key: repeats_within(call, budget) for key, call in calls.items()}
    wall: dict[str, list[float]] = {key: [] for key in calls}
    cpu: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            dist.barrier()
            call()  # This one is not measured, because the turn before affects it.
            used = time.process_time_ns()
            wall[key] += [timed(call) for _ in range(repeats[key])]
            cpu[key].append((time.process_time_ns() - used) / 1e3 / repeats[key])
    walls = slowest([statistics.median(wall[key]) for key in calls])
    cpus = slowest([statistics.median(cpu[key]) for key in calls])
    return dict(zip(calls, walls, strict=True)), dict(zip(calls, cpus, strict=True))


def repeats_within(call: Call, budget: float) -> int:
    """Return how often `call` fits into `budget` seconds; all ranks get the same number."""
    dist.barrier()
    expected = slowest([statistics.median([timed(call) for _ in range(3)])])[0]
    return max(2, min(1000, int(budget * 1e6 / max(expected, 1.0))))


def timed(call: Call) -> float:
    """Time one call in microseconds."""
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def tensor_of(size: int) -> torch.Tensor:
    return torch.zeros(max(1, size // 4)).fill_(0.0)


def plain(size: int, hvd: Any) -> Call:
    tensor = tensor_of(size)
    return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"benchmark.{size}")


def all_reduce(size: int, group: Any) -> Call:
    tensor = tensor_of(size)
    return lambda: dist.all_reduce(tensor, group=group)


def broadcast(size: int, group: Any) -> Call:
    tensor = tensor_of(size)
    return lambda: dist.broadcast(tensor, 0, group=group)


def all_gather(size: int, group: Any) -> Call:
    """Gather parts of that size; the output has as many as there are ranks."""
    tensor = tensor_of(size)
    output = torch.zeros(tensor.numel() * dist.get_world_size())
    return lambda: GATHER(output, tensor, group=group)


def reduce_scatter(size: int, group: Any) -> Call:
    """Give each rank a part of that size."""
    output = tensor_of(size)
    whole = torch.zeros(output.numel() * dist.get_world_size())
    return lambda: SCATTER(output, whole, group=group)


def stepping(model: nn.Module, before: Callable[[], object] = lambda: None) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = mlp_batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        before()
        optimizer.step()

    return step


def alone() -> Call:
    return stepping(make_mlp(), lambda: dist.barrier())


def ddp(group: Any) -> Call:
    return stepping(DistributedDataParallel(make_mlp(), process_group=group))


def unsent(group: Any) -> Call:
    def ended(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future

    model = DistributedDataParallel(make_mlp(), process_group=group)
    model.register_comm_hook(None, lambda _, bucket: ended(bucket.buffer()))
    return stepping(model, lambda: dist.barrier())


def fsdp(group: Any) -> Call:
    model = make_mlp()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return stepping(fully_shard(model, mesh=mesh))


COLLECTIVES = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
}
MODELS = {"ddp": ddp, "fsdp": fsdp}


if __name__ == "__main__":
    sys.exit(main())
