"""Measure what communication adds to a training step, for hvdlite and DistributedDataParallel.

    python benchmarks/step.py --np 2

There are three models (step_models.py): an MLP of 25 M parameters in 10 tensors, which needs
bandwidth; a ResNet-50 of 25.6 M parameters in 161 tensors; and a transformer of 2.5 M parameters in
200 small tensors. Copies of each model train in turns of a few steps, in the same processes, with
one thread per rank. The optimizer is SGD with momentum, or with --optimizer adamw torch's fused
AdamW:

- `alone`: a plain optimizer, without communication.
- `compute`: the same, with a barrier where the others communicate. What ranks wait for each other
  is in it; what the others take beyond it is communication.
- `hvdlite`: hvd.DistributedOptimizer.
- `ddp`: torch's DistributedDataParallel over gloo.
- `views`, with --views: hvdlite with gradient_as_bucket_view=True.
- `kept`, with --views: like `views`, with gradients that stay allocated
  (zero_grad(set_to_none=False)).
- `sharded`, with --modes: hvd.ShardedOptimizer; `one_copy`: the same with share_parameters=True.

With --hosts 2 the ranks are divided between two simulated hosts, network namespaces; this needs
root.

With --memory each of `alone`, `hvdlite`, `sharded`, `one_copy` and `ddp` has ranks of its own, and
trains some steps. Their rows have `pss_mib`: the memory of all ranks together, in which a page that
several processes share counts once.

A figure is the median over all steps on the slowest rank, in milliseconds. An overhead is the time
of a step minus that of `compute`, and `_per_cent` is its share of `compute`. `_range_ms` are the
fastest and the slowest turn.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as gloo
from step_models import MODELS, Batch
from torch import nn
from turns import join_gloo, slowest
from workers import add_common_arguments, print_row, run_on_hosts, run_ranks

ROUNDS = 12
STEPS_PER_TURN = 5
MEMORY_STEPS = 3
KINDS = ("alone", "hvdlite", "sharded", "one_copy", "ddp")  # of contestants, for --memory


@dataclass
class Contestant:
    """One copy of the model, and the way in which its gradients are combined."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    before_step: Callable[[], object]
    set_to_none: bool = True

    def step(self, batch: Batch) -> float:
        """Train one step; return its time in milliseconds."""
        inputs, labels = batch
        begin = time.perf_counter_ns()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.before_step()
        self.optimizer.step()
        return (time.perf_counter_ns() - begin) / 1e6


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--model", choices=MODELS, help="this model only")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="the plain one")
    parser.add_argument("--views", action="store_true", help="also with gradient_as_bucket_view")
    parser.add_argument("--modes", action="store_true", help="also with what docs/modes.md has")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="so many simulated hosts")
    parser.add_argument("--memory", action="store_true", help="only: the memory of the ranks")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick + ["--views"] * arguments.views
        passed_on += ["--optimizer", arguments.optimizer]
        passed_on += ["--modes"] * arguments.modes
        models = [arguments.model] if arguments.model else [*MODELS]
        each = [["--model", *models] if arguments.model else []]
        if arguments.memory:
            each = [["--model", one, "--only", kind] for one in models for kind in KINDS]
        ends = [start(arguments, [*passed_on, *more]) for more in each]
        return next((status for status in ends if status), 0)
    measure_all(arguments)
    return 0


def start(arguments: argparse.Namespace, passed_on: list[str]) -> int:
    """Start the ranks; return the exit status of their job."""
    ranks, output = arguments.np, arguments.output
    if arguments.hosts > 1:
        return run_on_hosts(__file__, ranks, arguments.hosts, output, passed_on)
    return run_ranks(__file__, ranks, output, passed_on)


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: measure every model, and print the rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    join_gloo(arguments.store, hvd.rank(), hvd.size())
    make_optimizer = OPTIMIZERS[arguments.optimizer]
    for name in [arguments.model] if arguments.model else MODELS:
        make_model, make_batch = MODELS[name]
        if arguments.only:
            measure_memory(name, arguments.optimizer, arguments.only)
            continue
        contestants = make_contestants(make_model, make_optimizer)
        contestants |= with_views(make_model, make_optimizer) if arguments.views else {}
        contestants |= sharded(make_model, make_optimizer) if arguments.modes else {}
        rounds, steps = (1, 1) if arguments.quick else (ROUNDS, STEPS_PER_TURN)
        turns = measure(contestants, make_batch, rounds, steps)
        row = row_of(name, contestants["compute"].model, turns)
        row["optimizer"] = arguments.optimizer
        if hvd.rank() == 0:
            print_row(row)
        del contestants
    gloo.destroy_process_group()
    hvd.shutdown()


def make_contestants(
    make_model: Callable[[], nn.Module], make_optimizer: MakeOptimizer
) -> dict[str, Contestant]:
    """Build the copies, with equal parameters on all ranks."""
    import hvdlite.torch as hvd

    torch.manual_seed(0)
    alone, control, ours = make_model(), make_model(), make_model()
    theirs = nn.parallel.DistributedDataParallel(make_model())
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    distributed = hvd.DistributedOptimizer(
        make_optimizer(ours), named_parameters=ours.named_parameters()
    )
    return {
        "alone": Contestant(alone, make_optimizer(alone), lambda: None),
        "compute": Contestant(control, make_optimizer(control), hvd.barrier),
        "hvdlite": Contestant(ours, distributed, lambda: None),
        "ddp": Contestant(theirs, make_optimizer(theirs), lambda: None),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def with_views(
    make_model: Callable[[], nn.Module], make_optimizer: MakeOptimizer
) -> dict[str, Contestant]:
    """Build the copies whose gradients are views of buckets."""
    import hvdlite.torch as hvd

    contestants = {}
    for name, set_to_none in (("views", True), ("kept", False)):
        model = make_model()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        distributed = hvd.DistributedOptimizer(
            make_optimizer(model), model.named_parameters(), gradient_as_bucket_view=True
        )
        contestants[name] = Contestant(model, distributed, lambda: None, set_to_none)
    return contestants


SHARDED = {"sharded": {}, "one_copy": {"share_parameters": True}}


def sharded(
    make_model: Callable[[], nn.Module], make_optimizer: MakeOptimizer
) -> dict[str, Contestant]:
    """Build the copies whose optimizer is divided among the ranks."""
    import hvdlite.torch as hvd

    contestants = {}
    for name, options in SHARDED.items():
        model = make_model()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.ShardedOptimizer(make_optimizer(model), model.named_parameters(), **options)
        contestants[name] = Contestant(model, optimizer, lambda: None)
    return contestants


def measure_memory(name: str, optimizer: str, kind: str) -> None:
    """Train one kind of contestant for some steps, and print the memory of all ranks on rank 0."""
    import hvdlite.torch as hvd

    make_model, make_batch = MODELS[name]
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    own = OPTIMIZERS[optimizer](model)
    if kind == "hvdlite":
        own = hvd.DistributedOptimizer(own, model.named_parameters())
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind != "alone":
        own = hvd.ShardedOptimizer(own, model.named_parameters(), **SHARDED[kind])
    contestant = Contestant(model, own, lambda: None)
    for _ in range(MEMORY_STEPS):
        contestant.step(make_batch())
    hvd.barrier()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    own_kib = torch.tensor(int(re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[0]))
    pss = hvd.allreduce(own_kib, op=hvd.Sum)
    if hvd.rank() == 0:
        row = {"benchmark": "step_memory", "model": name, "optimizer": optimizer, "kind": kind}
        print_row({**row, "np": hvd.size(), "pss_mib": round(int(pss) / 1024)})


def measure(
    contestants: dict[str, Contestant],
    make_batch: Callable[[], Batch],
    rounds: int,
    steps: int,
) -> dict[str, list[list[float]]]:
    """Let the contestants take turns; return the milliseconds of each step, turn by turn."""
    turns: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for round_number in range(1 + rounds):
        for name, contestant in contestants.items():
            # The first round, and the first step of a turn, only warm up.
            batches = [make_batch() for _ in range(1 + steps)]
            gloo.barrier()
            contestant.step(batches[0])
            times = [contestant.step(batch) for batch in batches[1:]]
            if round_number > 0:
                turns[name].append(times)
    return turns


def row_of(name: str, model: nn.Module, turns: dict[str, list[list[float]]]) -> dict[str, object]:
    """Make the row of one model; all ranks call this, as the figures are of the slowest rank."""
    row: dict[str, object] = {
        "benchmark": "step",
        "model": name,
        "np": gloo.get_world_size(),
        "tensors": len(list(model.parameters())),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    medians = {}
    for contestant, own in turns.items():
        by_turn = slowest([statistics.median(turn) for turn in own])
        every_step = [step for turn in own for step in turn]
        medians[contestant] = slowest([statistics.median(every_step)])[0]
        row[f"{contestant}_ms"] = round(medians[contestant], 2)
        row[f"{contestant}_range_ms"] = [round(min(by_turn), 2), round(max(by_turn), 2)]
    for contestant in [name for name in medians if name not in ("alone", "compute")]:
        overhead = medians[contestant] - medians["compute"]
        row[f"{contestant}_overhead_ms"] = round(overhead, 2)
        row[f"{contestant}_per_cent"] = round(100 * overhead / medians["compute"], 1)
    return row


if __name__ == "__main__":
    sys.exit(main())
