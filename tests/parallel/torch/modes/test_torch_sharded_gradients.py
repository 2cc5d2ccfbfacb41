"""`ShardedOptimizer(stage=2)` has the bits of `DistributedOptimizer`, and a share of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.modes.sharded_models import (
    MAKES,
    Model,
    assert_near,
    assert_same_bits,
    distributed,
    gradients_in,
    groups_of,
    loss_of,
    sharded,
    train_on,
)
from parallel.torch.small_models import raises
from references.sharded import train

PRELOAD = ("torch._dynamo",)
Loss = Callable[[nn.Module, int], torch.Tensor]


def divided(make: Any, model: Model, **arguments: Any) -> Any:
    return sharded(make, model, stage=2, **arguments)


def own_loss(model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model, step, hvd.rank())


def run_steps(
    model: nn.Module, optimizer: Any, steps: range, loss: Loss = own_loss, passes: int = 1
) -> None:
    """Train with several backward() calls in a step."""
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            loss(model, passes * step + part).backward()
        optimizer.step()


def params_of(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def scenario_same_bits_as_unsharded_and_near_plain_training() -> None:
    for make in MAKES.values():
        ours, theirs, plain = Model(), Model(), Model()
        train_on(ours, divided(make, ours), range(6))
        train_on(theirs, distributed(make, theirs), range(6))
        train(plain, make(groups_of(plain)), loss_of, hvd.size(), range(6))
        assert_same_bits(ours, theirs)
        assert_near(ours, plain)


def scenario_clipping_has_the_bits_of_torch() -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        for max_norm in (0.05, 1e6):
            models = [Model(), Model(), Model()]
            optimizers = [
                divided(MAKES["AdamW"], models[0]),
                sharded(MAKES["AdamW"], models[1]),
                distributed(MAKES["AdamW"], models[2]),
            ]
            for step in range(3):
                norms = []
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    own_loss(model, step).backward()
                    if hasattr(optimizer, "clip_grad_norm_"):
                        norms.append(optimizer.clip_grad_norm_(max_norm, norm_type))
                    else:
                        params = params_of(optimizer)
                        norms.append(nn.utils.clip_grad_norm_(params, max_norm, norm_type))
                    optimizer.step()
                assert norms[0] == norms[1] == norms[2] and norms[0].dtype == norms[2].dtype
            assert_same_bits(models[0], models[2])
            assert_same_bits(models[1], models[2])


def scenario_a_rank_has_the_gradients_of_its_own_parameters() -> None:
    model = nn.Sequential(*[nn.Linear(40 + i, 40) for i in range(9)])
    optimizer = hvd.ShardedOptimizer(torch.optim.Adam(model.parameters()), stage=2)
    loss = torch.stack([param.square().sum() for param in model.parameters()]).sum()
    loss.backward()
    held = [param.grad for param in model.parameters() if param.grad is not None]
    whole = sum(param.nbytes for param in model.parameters())
    largest = max(param.nbytes for param in model.parameters())
    assert 0 < sum(one.nbytes for one in held) <= 1.1 * (whole / hvd.size() + largest)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    assert sum(storages.values()) <= 1.1 * (whole / hvd.size() + largest)
    assert hvd.allreduce(torch.tensor(len(held)), op=hvd.Sum) == 18
    optimizer.step()
    assert len(optimizer.state) == len(held)
    assert gradients_in(model) == len(held)


def scenario_arguments_of_the_optimizer() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"num_groups": 2}, 1),
        ({"num_groups": 5}, 1),
        ({"bucket_cap_mb": 1e-4}, 1),
        ({"op": hvd.Sum}, 1),
        ({"gradient_predivide_factor": 2.0}, 1),
        ({"backward_passes_per_step": 2}, 2),
        ({"backward_passes_per_step": 2, "num_groups": 1}, 2),
    ]
    for arguments, passes in cases:
        ours, theirs = Model(), Model()
        one = divided(MAKES["SGD"], ours, **arguments)
        sgd = MAKES["SGD"](groups_of(theirs))
        other = hvd.DistributedOptimizer(sgd, theirs.named_parameters(), **arguments)
        run_steps(ours, one, range(4), passes=passes)
        run_steps(theirs, other, range(4), passes=passes)
        assert_same_bits(ours, theirs)


def scenario_groups_and_no_sync() -> None:
    ours, theirs = Model(), Model()
    optimizers = []
    for model, stage in ((ours, 2), (theirs, 1)):
        groups = [[model.table.weight, model.rare.weight], [*model.hidden.parameters()]]
        optimizers.append(sharded(MAKES["AdamW"], model, stage=stage, groups=groups))
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            with optimizer.no_sync():
                own_loss(model, 10 + step).backward()
            own_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        assert_same_bits(ours, theirs)


def scenario_a_rank_without_backward() -> None:
    ours, theirs = Model(), Model()
    pairs = [
        (ours, divided(MAKES["AdamW"], ours)),
        (theirs, distributed(MAKES["AdamW"], theirs)),
    ]
    for step in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            if hvd.rank() != step % hvd.size():
                own_loss(model, step).backward()
            optimizer.step()
        assert_same_bits(ours, theirs)


def scenario_layouts_in_memory_are_kept() -> None:
    def make_model() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3), nn.Flatten())
        return model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(100 * step + hvd.rank())
        x = torch.randn(2, 3, 8, 8, generator=numbers)
        result: torch.Tensor = model(x.to(memory_format=torch.channels_last)).square().mean()
        return result

    ours, theirs = make_model(), make_model()
    one = hvd.ShardedOptimizer(torch.optim.Adafactor(ours.parameters()), stage=2)
    other = hvd.DistributedOptimizer(torch.optim.Adafactor(theirs.parameters()))
    run_steps(ours, one, range(4), loss)
    run_steps(theirs, other, range(4), loss)
    assert_same_bits(ours, theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is None or (a.grad.stride() == b.grad.stride() and a.grad.equal(b.grad))


def scenario_narrow_floats() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        ours, theirs = Model().to(dtype), Model().to(dtype)
        for model in (ours, theirs):
            model.rare.double()
        pairs = [(ours, divided(MAKES["SGD"], ours)), (theirs, distributed(MAKES["SGD"], theirs))]
        for model, optimizer in pairs:
            run_steps(model, optimizer, range(4), lambda m, step: table_loss(m, step).float())
        assert_same_bits(ours, theirs)


def table_loss(model: Any, step: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100 * step + hvd.rank())
    x = torch.randint(11, (7,), generator=numbers)
    result: torch.Tensor = model.last(model.hidden(model.table(x))).square().mean()
    return result


def scenario_sparse_gradients_travel_dense() -> None:
    models: list[Any] = [Model(), Model()]
    for model in models:
        model.table = nn.Embedding.from_pretrained(model.table.weight, freeze=False, sparse=True)
    ours, theirs = models
    one = divided(MAKES["AdamW"], ours, sparse_as_dense=True)
    adam = MAKES["AdamW"](groups_of(theirs))
    other = hvd.DistributedOptimizer(adam, theirs.named_parameters(), sparse_as_dense=True)
    run_steps(ours, one, range(3))
    run_steps(theirs, other, range(3))
    assert_same_bits(ours, theirs)
    refused: Any = Model()
    refused.table = nn.Embedding(11, 6, sparse=True)
    with raises("the gradient of table.weight is sparse, and ShardedOptimizer with stage=2"):
        run_steps(refused, divided(MAKES["SGD"], refused), range(1))


def scenario_grad_scaler_skips_on_all_ranks() -> None:
    for make in (MAKES["SGD"], MAKES["fused AdamW"]):
        for unscale in (False, True):
            ours, theirs = Model(), Model()
            results = []
            for model, optimizer in (
                (ours, divided(make, ours)),
                (theirs, distributed(make, theirs)),
            ):
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
                scales = []
                for step in range(6):
                    optimizer.zero_grad()
                    loss = own_loss(model, step)
                    if step == 2 and hvd.rank() == 1:
                        loss = loss + model.last.bias.sum() * float("inf")
                    scaler.scale(loss).backward()
                    if unscale:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    scales.append(scaler.get_scale())
                results.append(scales)
            assert results[0] == results[1] and min(results[0]) < max(results[0])
            assert_same_bits(ours, theirs)


def scenario_a_rank_that_owns_nothing() -> None:
    param = nn.Parameter(torch.full((3,), 2.0))
    optimizer = hvd.ShardedOptimizer(torch.optim.SGD([param], lr=0.5), stage=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("nan") if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0
        scaler.scale((factor * param).sum()).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(1.0)
        assert norm.isnan() if step == 1 else norm == torch.tensor([1.0, 1.0, 1.0]).norm()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == [8.0, 4.0, 8.0][step]
    expected = 2.0 - 2 * 0.5 * torch.full((3,), 1.0) / (3.0**0.5 + 1e-6)
    assert torch.allclose(param, expected)


def scenario_parameters_that_are_frozen_thawed_and_added() -> None:
    ours, theirs = Model(), Model()
    added = [nn.Parameter(torch.full((50,), 0.5)) for _ in range(2)]
    optimizers = [divided(MAKES["AdamW"], ours), distributed(MAKES["AdamW"], theirs)]
    for step in range(6):
        for model in (ours, theirs):
            model.hidden.requires_grad_(step != 2)
            model.frozen.requires_grad_(step > 2)
        for model, optimizer, more in zip((ours, theirs), optimizers, added, strict=True):
            if step == 4:
                optimizer.add_param_group({"params": [more]})
            for param in model.parameters():
                if param.requires_grad:  # One that is frozen now still has its last gradient.
                    param.grad = None
            more.grad = None
            loss = own_loss(model, step) + (hvd.rank() + 1) * more.square().sum()
            loss.backward()
            optimizer.step()
        assert_same_bits(ours, theirs)
        assert torch.equal(*added)


def scenario_a_deep_copy_trains_on() -> None:
    ours, theirs = Model(), Model()
    optimizer = divided(MAKES["AdamW"], ours)
    train_on(ours, optimizer, range(2))
    copied_model, copied = copy.deepcopy((ours, optimizer))
    train_on(copied_model, copied, range(2, 4))
    train_on(ours, optimizer, range(2, 4))
    train_on(theirs, distributed(MAKES["AdamW"], theirs), range(4))
    assert_same_bits(copied_model, theirs)
    assert_same_bits(ours, theirs)
    assert len(copied.state) == len(optimizer.state) > 0


def scenario_files_go_from_stage_to_stage() -> None:
    ours, theirs = Model(), Model()
    one, other = divided(MAKES["AdamW"], ours), distributed(MAKES["AdamW"], theirs)
    train_on(ours, one, range(2))
    train_on(theirs, other, range(2))
    one.consolidate(to=0)
    state = one.state_dict() if hvd.rank() == 0 else other.state_dict()
    again = sharded(MAKES["AdamW"], ours_copy := copy.deepcopy(theirs), stage=2)
    again.load_state_dict(copy.deepcopy(state))
    train_on(ours_copy, again, range(2, 4))
    train_on(theirs, other, range(2, 4))
    assert_same_bits(ours_copy, theirs)


def scenario_members_of_a_process_set_divide_the_gradients_among_them() -> None:
    if hvd.size() == 2:
        return
    members = hvd.add_process_set([0, 1])
    model, theirs = Model(), Model()
    optimizer = divided(MAKES["AdamW"], model, process_set=members)
    for step in range(3):
        optimizer.zero_grad()
        own_loss(model, step).backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
    if members.included():
        train(theirs, MAKES["AdamW"](groups_of(theirs)), loss_of, 2, range(3), 0.05)
        assert_near(model, theirs)
    count = hvd.allreduce(torch.tensor(gradients_in(model)), op=hvd.Sum)
    assert count == 5 * (1 + hvd.size() - 2)  # Other ranks have their own gradients.
    hvd.remove_process_set(members)


def scenario_a_reduced_gradient_cannot_be_reduced_again() -> None:
    model = Model()
    optimizer = divided(MAKES["SGD"], model)
    own_loss(model, 1).backward()
    with raises("it cannot be added to and reduced again; call optimizer.zero_grad"):
        own_loss(model, 1).backward()
    optimizer.step()
    with raises("it cannot be added to and reduced again"), optimizer.no_sync():
        own_loss(model, 1).backward()
    optimizer.zero_grad(set_to_none=False)
    own_loss(model, 1).backward()
    optimizer.step()


def scenario_ranks_with_different_stages_get_an_error() -> None:
    model = Model()
    optimizer = sharded(MAKES["SGD"], model, stage=1 + hvd.rank() % 2)
    with raises("ranks disagree about the operation: .*rank . has (allreduce|reducescatter)"):
        train_on(model, optimizer, range(1))


def scenario_ranks_with_different_parameters_get_an_error() -> None:
    model = Model()
    model.hidden.bias.requires_grad_(hvd.rank() != 1)
    optimizer = divided(MAKES["SGD"], model)
    with raises("the parameter 'hidden.bias' is trained on rank.* and not on rank 1"):
        train_on(model, optimizer, range(1))


def scenario_what_does_not_go_with_stage_2_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    sgd = torch.optim.SGD(params, lr=0.1)
    for arguments, text in (
        ({"copies": 2}, "a reduced gradient reaches one rank; use stage=1"),
        ({"compression": hvd.Compression.fp16}, "cannot be combined with compression="),
        ({"gradient_as_bucket_view": True}, "cannot be combined with gradient_as_bucket_view=True"),
        ({"weight": 1.0}, "cannot be combined with weight="),
    ):
        with raises(text):
            hvd.ShardedOptimizer(sgd, stage=2, **arguments)
    optimizer = hvd.ShardedOptimizer(sgd, stage=2)
    with raises("cannot be combined with weight="):
        optimizer.weight = 2.0


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_sharded_gradients = make_tests(body, on_hosts([0, 0], [0, 1, 1], [0, 0, 1, 1]))


def join_early() -> str:
    hvd.init()
    model = Model()
    optimizer = divided(MAKES["AdamW"], model)
    train_on(model, optimizer, range(1))
    if hvd.rank() == 1:
        hvd.join()
        return ""
    with pytest.raises(hvd.HvdliteError) as caught:
        train_on(model, optimizer, range(1, 2))
    hvd.join()
    return str(caught.value)


def test_the_ranks_that_go_on_without_a_joined_rank_get_an_error() -> None:
    texts = [result.value for result in run_world(2, join_early)]
    assert "rank 1, which has joined and takes nothing any more" in texts[0]


def train_alone() -> None:
    hvd.init()
    ours, theirs = Model(), Model()
    optimizer = divided(MAKES["AdamW"], ours)
    for step in range(3):
        optimizer.zero_grad()
        own_loss(ours, step).backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
    train(theirs, MAKES["AdamW"](groups_of(theirs)), loss_of, 1, range(3), 0.05)
    assert_near(ours, theirs)


def test_one_rank_trains_alone() -> None:
    run_world(1, train_alone)
