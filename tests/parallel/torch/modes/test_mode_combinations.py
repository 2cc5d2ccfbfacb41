"""Modes together with each other and with arguments of `DistributedOptimizer`.

The tests of a mode hold that mode against its reference. Here a combination has the bits of the
same training without one of the modes, wherever docs/modes.md says that the mode changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.modes.sharded_models import (
    MAKES,
    Model,
    assert_same_bits,
    groups_of,
    loss_of,
)
from parallel.torch.small_models import assert_close, assert_same_everywhere, raises
from references.powersgd import train as train_by_powersgd

PRELOAD = ("torch._dynamo",)

Distribute = Callable[..., Any]


def unsharded(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, *arguments, **options)


def stage_1(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return hvd.ShardedOptimizer(optimizer, *arguments, **options)


def copied(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return hvd.ShardedOptimizer(optimizer, *arguments, copies=2, **options)


def stage_2(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return hvd.ShardedOptimizer(optimizer, *arguments, stage=2, **options)


SHARDED: tuple[Distribute, ...] = (stage_1, copied, stage_2)

# What stage 2 does not take is refused with a sentence; test_torch_sharded_gradients has them.
ARGUMENTS: list[tuple[dict[str, Any], bool]] = [  # whether stage 2 takes them
    ({"compression": hvd.Compression.fp16}, False),
    ({"compression": hvd.Compression.bf16}, False),
    ({"compression": hvd.Compression.int8}, False),
    ({"weight": lambda: 1.0 + hvd.rank()}, False),
    ({"gradient_as_bucket_view": True}, False),
    ({"backward_passes_per_step": 2}, True),
    ({"op": hvd.Sum}, True),
    ({"gradient_predivide_factor": 2.0}, True),
    ({"num_groups": 3}, True),
]


def make_pair(distribute: Distribute, **arguments: Any) -> list[tuple[Model, Any]]:
    """Make a model with this optimizer, and an equal one with a `DistributedOptimizer`."""
    pairs = []
    for way in (distribute, unsharded):
        model = Model()
        adam = MAKES["AdamW"](groups_of(model))
        pairs.append((model, way(adam, model.named_parameters(), **arguments)))
    return pairs


def scenario_sharded_with_each_argument_has_the_bits_of_unsharded() -> None:
    for arguments, also_stage_2 in ARGUMENTS:
        passes = arguments.get("backward_passes_per_step", 1)
        for distribute in SHARDED if also_stage_2 else SHARDED[:2]:
            (ours, one), (theirs, other) = make_pair(distribute, **arguments)
            for model, optimizer in ((ours, one), (theirs, other)):
                for step in range(3):
                    optimizer.zero_grad()
                    for part in range(passes):
                        loss_of(model, passes * step + part, hvd.rank()).backward()
                    optimizer.step()
            assert_same_bits(ours, theirs)


def scenario_sharded_in_all_sets_of_neighbours() -> None:
    pairs = [[rank, rank + 1] for rank in range(hvd.size() - 1)]
    sets = [hvd.add_process_set(ranks) for ranks in pairs if len(ranks) < hvd.size()]
    for members in sets:
        for distribute in SHARDED:
            trained = make_pair(distribute, process_set=members)
            for model, optimizer in trained:
                for step in range(2):
                    optimizer.zero_grad()
                    loss_of(model, step, hvd.rank()).backward()
                    optimizer.step()
            assert_same_bits(trained[0][0], trained[1][0])
    for members in sets:
        hvd.remove_process_set(members)


def scenario_sharded_with_a_scaler() -> None:
    for distribute in SHARDED:
        trained, scales = make_pair(distribute), []
        for model, optimizer in trained:
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
            for step in range(4):
                optimizer.zero_grad()
                factor = math.inf if step == 2 and hvd.rank() == hvd.size() - 1 else 1.0
                scaler.scale(factor * loss_of(model, step, hvd.rank())).backward()
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [256.0, 256.0]
        assert_same_bits(trained[0][0], trained[1][0])


class Normalized(nn.Module):
    """Has a layer that waits for all ranks in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(20, 30), hvd.SyncBatchNorm(30)
        self.last = nn.Linear(30, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)).tanh())
        return result


def normalized_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 20, generator=numbers).double()
    return (model(x) - x[:, :5].sin() - rank).square().mean()


def train_normalized(distribute: Distribute, **arguments: Any) -> Normalized:
    model = Normalized()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = distribute(sgd, **arguments)
    for step in range(5):
        optimizer.zero_grad()
        normalized_loss(model, step, hvd.rank()).backward()
        optimizer.step()
    return model


def scenario_batch_normalization_over_all_ranks() -> None:
    expected = train_normalized(unsharded)
    for distribute in SHARDED:
        assert_same_bits(train_normalized(distribute), expected)
    every_step = train_normalized(hvd.LocalSGD, every=1)
    assert_close(list(every_step.parameters()), list(expected.parameters()), 1e-9)
    assert_close([every_step.norm.running_mean], [expected.norm.running_mean], 1e-9)
    compressed = train_normalized(
        unsharded, compression=hvd.Compression.powersgd(rank=2, start=1, least_gain=1.5)
    )
    assert_same_everywhere(compressed)
    assert not torch.equal(compressed.first.weight, expected.first.weight)


# PowerSGD. Its reference is one process with torch's own products.


def powersgd() -> Any:
    return hvd.Compression.powersgd(rank=2, start=2, least_gain=1.5)


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 5)]
    return nn.Sequential(*layers).double()


def reference(loss: Any, weights: Callable[[int], list[float]], steps: int) -> list[torch.Tensor]:
    model = plain_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_by_powersgd(model, sgd, loss, range(steps), powersgd(), weights)
    return list(model.parameters())


def make_compressed(distribute: Distribute = unsharded, **arguments: Any) -> tuple[Any, Any]:
    model = plain_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, distribute(sgd, compression=powersgd(), **arguments)


def scenario_powersgd_with_shards_and_accumulation() -> None:
    def both(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        first, last = (normalized_loss(model, 2 * step + part, rank) for part in (0, 1))
        return first + last

    expected = reference(both, lambda step: [1.0] * hvd.size(), 8)
    for distribute in (unsharded, stage_1, copied):
        for passes in (1, 2):
            model, optimizer = make_compressed(distribute, backward_passes_per_step=passes)
            for step in range(8):
                optimizer.zero_grad()
                if passes == 1:
                    with optimizer.no_sync():
                        normalized_loss(model, 2 * step, hvd.rank()).backward()
                else:
                    normalized_loss(model, 2 * step, hvd.rank()).backward()
                normalized_loss(model, 2 * step + 1, hvd.rank()).backward()
                optimizer.step()
            assert_close(list(model.parameters()), expected, 1e-9)
            assert_same_everywhere(model)


def scenario_powersgd_in_a_process_set() -> None:
    if hvd.size() == 2:
        return
    ranks = list(range(1, hvd.size()))
    members = hvd.add_process_set(ranks)
    model, optimizer = make_compressed(process_set=members)
    for step in range(6):
        optimizer.zero_grad()
        normalized_loss(model, step, hvd.rank()).backward()
        optimizer.step()
    if members.included():
        expected = reference(
            lambda model, step, rank: normalized_loss(model, step, ranks[rank]),
            lambda step: [1.0] * len(ranks),
            6,
        )
        assert_close(list(model.parameters()), expected, 1e-9)
    hvd.remove_process_set(members)


def scenario_what_the_table_refuses() -> None:
    model = Model()
    sgd = MAKES["SGD"](groups_of(model))
    with raises("Compression.int4 cannot be combined with DistributedOptimizer"):
        unsharded(MAKES["SGD"](groups_of(Model())), compression=hvd.Compression.int4)
    with raises("with op=hvd.Adasum"):
        hvd.ShardedOptimizer(sgd, op=hvd.Adasum)
    with raises("Compression.powersgd cannot be combined with op=hvd.Adasum"):
        unsharded(sgd, op=hvd.Adasum, compression=powersgd())
    with raises("cannot be combined with compression="):
        stage_2(sgd, compression=powersgd())


def send_ones(optimizer: Any) -> None:
    """Send gradients of ones."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


# On two hosts, because int8 travels between hosts only.
test_mode_combinations = make_tests(body, on_hosts([0, 1], [0, 1, 1], [0, 0, 1, 1]))
