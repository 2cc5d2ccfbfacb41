"""Modes together with each other and with arguments of `DistributedOptimizer`.

The tests of a mode hold that mode against its reference. Here a combination has the bits of the
same training without one of the modes, wherever docs/modes.md says that the mode changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite import basics
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.modes.sharded_models import (
    MAKES,
    Model,
    assert_same_bits,
    groups_of,
    loss_of,
)
from parallel.torch.small_models import raises

PRELOAD = ("torch._dynamo",)

Distribute = Callable[..., Any]


def unsharded(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, *arguments, **options)


def sharded(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return hvd.ShardedOptimizer(optimizer, *arguments, **options)


ARGUMENTS: list[dict[str, Any]] = [
    {"compression": hvd.Compression.fp16},
    {"compression": hvd.Compression.bf16},
    {"weight": lambda: 1.0 + hvd.rank()},
    {"gradient_as_bucket_view": True},
    {"backward_passes_per_step": 2},
    {"op": hvd.Sum},
    {"gradient_predivide_factor": 2.0},
    {"num_groups": 3},
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
    for arguments in ARGUMENTS:
        passes = arguments.get("backward_passes_per_step", 1)
        (ours, one), (theirs, other) = make_pair(sharded, **arguments)
        for model, optimizer in ((ours, one), (theirs, other)):
            for step in range(3):
                optimizer.zero_grad()
                for part in range(passes):
                    loss_of(model, passes * step + part, hvd.rank()).backward()
                optimizer.step()
        assert_same_bits(ours, theirs)


def scenario_sharded_with_a_scaler() -> None:
    trained, scales = make_pair(sharded), []
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor= .*op=hvd.Sum"),
    ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "predivide_factor= .*op=hvd.Adasum"),
    ({"op": hvd.Sum, "weight": 2.0}, "weight= .*op=hvd.Sum: it makes a weighted average; use"),
    ({"op": hvd.Adasum, "weight": 2.0}, "weight= .*op=hvd.Adasum: it makes a weighted average"),
    ({"op": hvd.Adasum, "gradient_as_bucket_view": True}, "bucket_view=True .*op=hvd.Adasum: "),
    ({"op": hvd.Sum, "late": hvd.Late()}, "late= .*op=hvd.Sum: .*; use op=hvd.Average"),
    ({"op": hvd.Adasum, "late": hvd.Late()}, "late= .*op=hvd.Adasum: .*; use op=hvd.Average"),
    ({"op": hvd.Sum, "virtual_size": 4}, "virtual_size= .*op=hvd.Sum: .*; use op=hvd.Average"),
    ({"op": hvd.Adasum, "virtual_size": 4}, "virtual_size= .*op=hvd.Adasum: .*; use"),
    ({"gradient_predivide_factor": 2.0, "virtual_size": 4}, "size= .*predivide_factor=: .*; leave"),
    ({"weight": 2.0, "virtual_size": 4}, "virtual_size= .*weight=: .*; leave weight= out"),
    ({"backward_passes_per_step": 2, "virtual_size": 4}, "size= .*backward_passes_per_step=: "),
    ({"gradient_as_bucket_view": True, "virtual_size": 4}, "size= .*gradient_as_bucket_view=True"),
    ({"compression": hvd.Compression.bf16, "virtual_size": 4}, "size= .*compression=: .*; leave"),
    ({"late": hvd.Late(), "virtual_size": 4}, "virtual_size= .*late=: .*; leave late= out"),
]


def scenario_options_that_exclude_each_other_are_refused() -> None:
    own = hvd.add_process_set([0])
    sgd = MAKES["SGD"](groups_of(Model()))
    cases = [
        *REFUSED,
        ({"process_set": own, "virtual_size": 4}, "size= .*process_set=: .*; leave"),
    ]
    for arguments, text in cases:
        with raises(text.replace(" .*", " cannot be combined with .*", 1)):
            hvd.DistributedOptimizer(sgd, **arguments)
    for arguments, text in (
        ({"op": hvd.Adasum}, "op=hvd.Adasum: it updates all parameters on every rank; use"),
        ({"late": hvd.Late()}, "late=: .*; use DistributedOptimizer"),
    ):
        with raises(f"ShardedOptimizer cannot be combined with {text}"):
            hvd.ShardedOptimizer(sgd, **arguments)
    with raises("virtual_size= cannot be combined with ShardedOptimizer: .*; use Distributed"):
        hvd.ShardedOptimizer(sgd, virtual_size=4)
    for arguments, other in (
        ({"op": hvd.Adasum}, r"LocalSGD\(Distributed.* cannot be combined with op=hvd.Adasum: "),
        ({"virtual_size": 4}, r"virtual_size= cannot be combined with LocalSGD\(Distributed"),
    ):
        optimizer = hvd.DistributedOptimizer(MAKES["SGD"](groups_of(Model())), **arguments)
        with raises(other):
            hvd.LocalSGD(optimizer)
    optimizer = hvd.ShardedOptimizer(MAKES["SGD"](groups_of(Model())), share_parameters=True)
    with raises(r"share_parameters=True\) cannot be combined with LocalSGD: .*; leave"):
        hvd.LocalSGD(optimizer)
    for arguments in ({"virtual_size": 4}, {"late": hvd.Late()}):
        optimizer = hvd.DistributedOptimizer(MAKES["SGD"](groups_of(Model())), **arguments)
        with raises(r"= cannot be combined with step\(closure\): .*; call step"):
            optimizer.step(lambda: None)
    optimizer = hvd.DistributedOptimizer(MAKES["SGD"](groups_of(Model())), virtual_size=4)
    with raises("virtual_size= cannot be combined with weight="):
        optimizer.weight = 2.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics, "in_elastic_job", lambda: True)
        with raises("late= cannot be combined with an elastic job: .*; leave late= out"):
            hvd.DistributedOptimizer(sgd, late=hvd.Late())
        with raises("ShardedOptimizer cannot be combined with an elastic job: .*; use Distributed"):
            hvd.ShardedOptimizer(sgd, share_parameters=True)
    hvd.remove_process_set(own)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_mode_combinations = make_tests(body, on_hosts([0, 1, 1]))
