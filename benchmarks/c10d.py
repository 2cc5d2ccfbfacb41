"""Measure torch.distributed over the backend hvdlite, beside gloo in the same run.

    python benchmarks/c10d.py --np 2 > c10d.jsonl

There is a row for each collective and size, and one for each way of training a model. `ddp` has
25 M parameters in 10 tensors, `ddp_resnet` is a ResNet-50, and `ddp_small` has 85 k parameters. The
contestants take turns in the same processes, with one thread per rank:

- `hvdlite`: torch.distributed's function with a group of the backend hvdlite.
- `gloo`: the same with gloo.
- `plain`, of all-reduce: hvd.allreduce_, without torch.distributed.
- `floor`, of training: DistributedDataParallel with a communication hook that sends nothing, and a
  barrier before each step of the optimizer. For `fsdp`: the model alone, with the same barrier.

With --replace, programs that name gloo train, over gloo and over hvdlite in its place (`hvdlite-run
--replace-gloo`): jobs of each take turns. `trainer` is the Trainer of transformers, with a model of
25 M parameters. The last rows have the medians over the turns.

`_us` is the median wall time of a call on the slowest rank, and `_cpu_us` the processor time of a
call, with all threads of the process, on the rank that needs most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import Contestant
from step_models import MODELS as SHAPES
from step_models import Batch, make_mlp, mlp_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from turns import Call, Cost, costs_of, join_gloo, slowest
from workers import add_common_arguments, print_row, run_ranks

SIZES = [4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK_SIZES = [4, 1 << 20]
SECONDS = 2.0
ROUNDS = 8
TURNS = 5  # of jobs over gloo, and over hvdlite in its place

# Their names since torch 2.13, and before.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--only", help="comma-separated collectives or models")
    parser.add_argument("--replace", action="store_true", help="programs that name gloo")
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick
        passed_on += ["--only", arguments.only] if arguments.only else []
        if arguments.replace:
            return in_turns(arguments, [*passed_on, "--replace"])
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    if arguments.replace:
        train_over_gloo(arguments)
    else:
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
            models["floor"] = alone() if name == "fsdp" else MODELS[name](None)
            tell({"model": name}, models, arguments.quick)
    dist.destroy_process_group()
    hvd.shutdown()


def in_turns(arguments: argparse.Namespace, passed_on: list[str]) -> int:
    """Run jobs over gloo, and over hvdlite in its place, in turns; return the exit status."""
    with tempfile.NamedTemporaryFile("r", prefix="hvdlite-c10d-", suffix=".jsonl") as file:
        for _ in range(1 if arguments.quick else TURNS):
            for flags in ([], ["--replace-gloo"]):
                status = run_ranks(__file__, arguments.np, Path(file.name), passed_on, *flags)
                if status:
                    return status
        rows = [json.loads(line) for line in file]
    for model in dict.fromkeys(row["model"] for row in rows):
        medians = {
            f"{row['over']}_{unit}": statistics.median(
                one[unit] for one in rows if (one["model"], one["over"]) == (model, row["over"])
            )
            for row in rows
            for unit in ("us", "cpu_us")
        }
        faster = round(medians["gloo_us"] / medians["hvdlite_us"], 2)
        row = {"benchmark": "replace_gloo", "np": arguments.np, "model": model, **medians}
        print_row({**row, "faster_than_gloo": faster})
    return 0


def train_over_gloo(arguments: argparse.Namespace) -> None:
    """Run one rank of a program that names gloo, and print the rows on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds, seconds = (1, 0.05) if arguments.quick else (1, SECONDS)
    over = "hvdlite" if os.environ.get("HVDLITE_REPLACE_GLOO") else "gloo"
    wanted = arguments.only.split(",") if arguments.only else [*REPLACED, "trainer"]
    for name in wanted:
        if name == "trainer":
            cost = cost_of_trainer(3 if arguments.quick else 20)
        else:
            cost = costs_of({name: REPLACED[name](dist.group.WORLD)}, rounds, seconds)[name]
        if dist.get_rank() == 0:
            figures = {"us": round(cost.us, 1), "cpu_us": round(cost.cpu_us, 1)}
            print_row({"benchmark": "replace_gloo_turn", "model": name, "over": over, **figures})
    dist.destroy_process_group()


def cost_of_trainer(steps: int) -> Cost:
    """Return what a step of the Trainer of transformers costs, without the first two."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_mlp()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}

    ends: list[tuple[int, int]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter_ns(), time.process_time_ns()))

    inputs, labels = mlp_batch()
    rows = [{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=len(rows) // dist.get_world_size(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(Model(), settings, train_dataset=rows, callbacks=[Clock()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    walls, processors = (
        [(after - before) / 1e3 for before, after in itertools.pairwise(column)][1:]
        for column in zip(*ends, strict=True)
    )
    figures = [statistics.median(walls), min(walls), statistics.median(processors)]
    return Cost(*slowest(figures))


def tell(row: dict[str, Any], calls: dict[str, Call], quick: bool) -> None:
    """Measure the contestants, and print a row."""
    rounds, seconds = (1, 0.05) if quick else (ROUNDS, SECONDS / ROUNDS / len(calls))
    costs = costs_of(calls, rounds, seconds)
    if dist.get_rank() != 0:
        return
    figures: dict[str, Any] = {}
    for key, cost in costs.items():
        figures |= {f"{key}_us": round(cost.us, 1), f"{key}_cpu_us": round(cost.cpu_us, 1)}
    ours, gloo = costs["hvdlite"], costs["gloo"]
    figures["faster_than_gloo"] = round(gloo.us / ours.us, 2)
    if "plain" in costs:
        figures["cpu_times_plain"] = round(ours.cpu_us / costs["plain"].cpu_us, 2)
    if "floor" in costs:
        alone = costs["floor"]
        added = max(gloo.us - alone.us, 1.0), max(gloo.cpu_us - alone.cpu_us, 1.0)
        figures["added_to_gloos"] = round((ours.us - alone.us) / added[0], 2)
        figures["cpu_added_to_gloos"] = round((ours.cpu_us - alone.cpu_us) / added[1], 2)
    print_row({"benchmark": "c10d", "np": dist.get_world_size(), **row, **figures})


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


def stepping(
    model: nn.Module, before: Callable[[], object] = lambda: None, batch: Batch | None = None
) -> Call:
    contestant = Contestant(model, torch.optim.SGD(model.parameters(), lr=1e-3), before)
    given = mlp_batch() if batch is None else batch
    return lambda: contestant.step(given)


def alone() -> Call:
    return stepping(make_mlp(), lambda: dist.barrier())


def ddp(group: Any, model: nn.Module | None = None, batch: Batch | None = None) -> Call:
    """Train with DistributedDataParallel over a group; None: without sending anything."""
    own = DistributedDataParallel(model or make_mlp(), process_group=group)
    if group is not None:
        return stepping(own, batch=batch)
    own.register_comm_hook(None, lambda _, bucket: completed(bucket.buffer()))
    return stepping(own, lambda: dist.barrier(), batch)


def completed(value: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def ddp_resnet(group: Any) -> Call:
    make_model, make_batch = SHAPES["resnet"]
    return ddp(group, make_model(), make_batch())


def ddp_small(group: Any) -> Call:
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64)]
    batch = torch.randn(64, 256), torch.randint(0, 64, (64,))
    return ddp(group, nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 64)), batch)


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
REPLACED = {"ddp": ddp, "ddp_resnet": ddp_resnet, "ddp_small": ddp_small}
MODELS = {**REPLACED, "fsdp": fsdp}


if __name__ == "__main__":
    sys.exit(main())
