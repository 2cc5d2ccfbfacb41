"""Measure what communication adds to a training step, for hvdlite and DistributedDataParallel.

    python benchmarks/step.py --np 2

There are two models: an MLP of 25 M parameters in 10 tensors, which needs bandwidth, and a
transformer of 2.5 M parameters in 200 small tensors. Copies of each model train in turns of a few
steps, in the same processes, with one thread per rank:

- `compute`: a plain optimizer, with a barrier where the others communicate.
- `hvdlite`: hvd.DistributedOptimizer.
- `ddp`: torch's DistributedDataParallel over gloo.
- `views`, with --views: hvdlite with gradient_as_bucket_view=True.
- `kept`, with --views: like `views`, with gradients that stay allocated
  (zero_grad(set_to_none=False)).
- `sharded` and `sharded_2`, with --modes: hvd.ShardedOptimizer, stages 1 and 2.

With --sentinel there are `hvdlite` and `watched`, the same with HVDLITE_CHECK_REPLICAS=100, alone.
They take turns of 100 steps, of which one compares. Their figures are means, and `watched_ratio` is
the median over the turns.

With --modes the row also has `check_ms`: the time of one hvd.check_replicas() of the model, which a
ReplicaWatch runs in one step of `every`.

A figure is the median over all steps on the slowest rank, in milliseconds. An overhead is the time
of a step minus that of `compute`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as gloo
from gloo_ranks import join_gloo, slowest
from torch import nn
from workers import add_common_arguments, print_row, run_ranks

ROUNDS = 12
STEPS_PER_TURN = 5
QUICK_ROUNDS = 1
QUICK_STEPS_PER_TURN = 1
SENTINEL_STEPS = 100
SENTINEL_ROUNDS = 7
VOCABULARY = 1500
SEQUENCE = 32


class Transformer(nn.Module):
    """A small language model: 200 parameter tensors, 2.5 M parameters."""

    def __init__(self, width: int = 128, layers: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(tokens) + self.positions.weight
        logits = self.head(self.norm(self.layers(embedded)))
        return logits.flatten(0, 1)


def make_mlp() -> nn.Module:
    """Build five linear layers: 10 tensors, 25 M parameters."""
    widths = [1024, 2560, 2560, 2560, 2560, 1000]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 1024), torch.randint(1000, (32,))


def transformer_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (8, SEQUENCE))
    return tokens, tokens.flatten()


@dataclass
class Contestant:
    """One copy of the model, and the way in which its gradients are combined."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    before_step: Callable[[], object]
    set_to_none: bool = True

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Train one step; return its time in milliseconds."""
        inputs, labels = batch
        begin = time.perf_counter_ns()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.before_step()
        self.optimizer.step()
        return (time.perf_counter_ns() - begin) / 1e6


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (make_mlp, mlp_batch),
    "transformer": (Transformer, transformer_batch),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--model", choices=MODELS, help="this model only")
    parser.add_argument("--views", action="store_true", help="also with gradient_as_bucket_view")
    parser.add_argument("--modes", action="store_true", help="also with what docs/modes.md has")
    parser.add_argument("--sentinel", action="store_true", help="only: hvdlite with and without it")
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick + ["--views"] * arguments.views
        passed_on += ["--modes"] * arguments.modes + ["--sentinel"] * arguments.sentinel
        if arguments.model:
            passed_on += ["--model", arguments.model]
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    measure_all(arguments)
    return 0


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: measure every model, and print the rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    join_gloo(arguments.store, hvd.rank(), hvd.size())
    for name in [arguments.model] if arguments.model else MODELS:
        make_model, make_batch = MODELS[name]
        if arguments.sentinel:
            measure_sentinel(name, arguments.quick)
            continue
        contestants = make_contestants(make_model)
        contestants |= with_views(make_model) if arguments.views else {}
        contestants |= sharded(make_model) if arguments.modes else {}
        rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
        steps = QUICK_STEPS_PER_TURN if arguments.quick else STEPS_PER_TURN
        turns = measure(contestants, make_batch, rounds, steps)
        row = row_of(name, contestants["compute"].model, turns)
        if arguments.modes:
            row["check_ms"] = round(check_time(contestants["hvdlite"].model), 2)
        if hvd.rank() == 0:
            print_row(row)
        del contestants
    gloo.destroy_process_group()
    hvd.shutdown()


def make_contestants(make_model: Callable[[], nn.Module]) -> dict[str, Contestant]:
    """Build the copies, with equal parameters on all ranks."""
    import hvdlite.torch as hvd

    torch.manual_seed(0)
    alone, ours = make_model(), make_model()
    theirs = nn.parallel.DistributedDataParallel(make_model())
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    distributed = hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters())
    return {
        "compute": Contestant(alone, sgd(alone), hvd.barrier),
        "hvdlite": Contestant(ours, distributed, lambda: None),
        "ddp": Contestant(theirs, sgd(theirs), lambda: None),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def with_views(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
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


def sharded(make_model: Callable[[], nn.Module]) -> dict[str, Contestant]:
    """Build the copies whose optimizer is divided among the ranks."""
    import hvdlite.torch as hvd

    contestants = {}
    for name, stage in (("sharded", 1), ("sharded_2", 2)):
        model = make_model()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.ShardedOptimizer(sgd(model), model.named_parameters(), stage=stage)
        contestants[name] = Contestant(model, optimizer, lambda: None)
    return contestants


def measure_sentinel(name: str, quick: bool) -> None:
    """Measure steps with and without HVDLITE_CHECK_REPLICAS, by turns; print a row on rank 0."""
    import hvdlite.torch as hvd

    make_model, make_batch = MODELS[name]
    contestants = {}
    for contestant, every in (("hvdlite", "0"), ("watched", str(SENTINEL_STEPS))):
        torch.manual_seed(0)
        model = make_model()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        os.environ["HVDLITE_CHECK_REPLICAS"] = every
        distributed = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        contestants[contestant] = Contestant(model, distributed, lambda: None)
    steps = 2 if quick else SENTINEL_STEPS
    turns = measure(contestants, make_batch, QUICK_ROUNDS if quick else SENTINEL_ROUNDS, steps)
    model = contestants["hvdlite"].model
    row: dict[str, object] = {"benchmark": "sentinel", "model": name, "np": gloo.get_world_size()}
    row["check_ms"] = round(check_time(model), 2)
    means = {one: slowest([statistics.mean(turn) for turn in turns[one]]) for one in turns}
    ratios = [b / a for a, b in zip(means["hvdlite"], means["watched"], strict=True)]
    for contestant, times in means.items():
        row[f"{contestant}_ms"] = round(statistics.median(times), 3)
    row["watched_ratio"] = round(statistics.median(ratios), 4)
    row["watched_ratio_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
    if hvd.rank() == 0:
        print_row(row)


def check_time(model: nn.Module) -> float:
    """Return how long a comparison of the replicas takes, in ms: the median of five."""
    import hvdlite.torch as hvd

    times = []
    for _ in range(5):
        hvd.barrier()
        begin = time.perf_counter_ns()
        hvd.check_replicas(model.named_parameters())
        times.append((time.perf_counter_ns() - begin) / 1e6)
    return slowest([statistics.median(times)])[0]


def measure(
    contestants: dict[str, Contestant],
    make_batch: Callable[[], tuple[torch.Tensor, ...]],
    rounds: int,
    steps: int,
) -> dict[str, list[list[float]]]:
    """Let the contestants take turns; return, by contestant and turn, its step times in ms."""
    times: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for round_number in range(1 + rounds):
        for name, contestant in contestants.items():
            gloo.barrier()
            turn = []
            for _ in range(1 + steps):
                inputs, labels = make_batch()
                turn.append(contestant.step((inputs, labels)))
            if round_number > 0:  # The first round, and the first step of a turn, only warm up.
                times[name].append(turn[1:])
    return times


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
    for contestant, times in turns.items():
        by_turn = slowest([statistics.median(turn) for turn in times])
        every_step = [step for turn in times for step in turn]
        medians[contestant] = slowest([statistics.median(every_step)])[0]
        row[f"{contestant}_ms"] = round(medians[contestant], 2)
        row[f"{contestant}_range_ms"] = [round(min(by_turn), 2), round(max(by_turn), 2)]
    for contestant in [name for name in medians if name != "compute"]:
        row[f"{contestant}_overhead_ms"] = round(medians[contestant] - medians["compute"], 2)
    return row


if __name__ == "__main__":
    sys.exit(main())
