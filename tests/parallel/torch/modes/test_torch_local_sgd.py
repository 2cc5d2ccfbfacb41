"""LocalSGD and DiLoCo against one process that simulates all ranks."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.modes.local_models import (
    adamw,
    assert_equal,
    loss_of,
    make_model,
    sgd,
    simulate,
    take_steps,
)
from parallel.torch.small_models import (
    Evaluating,
    assert_close,
    assert_same_everywhere,
    counters,
    raises,
)

PRELOAD = ("torch._dynamo",)
STEPS = 26


CASES: list[dict[str, Any]] = [
    {"every": 1},
    {"every": 4},
    {"every": 7, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"every": 5, "outer_lr": 0.8, "outer_momentum": 0.5},
]


def scenario_equals_the_simulation_to_the_bit() -> None:
    for make in (sgd, adamw):
        for case in CASES:
            model = make_model()
            take_steps(model, hvd.LocalSGD(make(model.parameters()), **case), 1, STEPS)
            assert_equal(model, simulate(make, STEPS, **case)[hvd.rank()])


def scenario_sends_one_part_in_every() -> None:
    sent = {}
    for every in (1, 2, 8):
        model = make_model()
        optimizer = hvd.LocalSGD(sgd(model.parameters()), every=every)
        take_steps(model, optimizer, 1, 8)
        before = counters()["bytes"]
        take_steps(model, optimizer, 9, 24)
        sent[every] = counters()["bytes"] - before
    bytes_of_model = sum(4 * param.numel() for param in make_model().parameters())
    assert sent == {1: 16 * bytes_of_model, 2: 8 * bytes_of_model, 8: 2 * bytes_of_model}


def scenario_average_makes_ranks_equal() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model.parameters()), every=8)
    for first in (1, 8, 15):
        take_steps(model, optimizer, first, first + 6)
        with raises("call optimizer.average"):
            optimizer.state_dict()
        optimizer.average()
        assert_same_everywhere(model)
        before = [param.clone() for param in model.parameters()]
        optimizer.average()
        assert_equal(model, before)


def scenario_weights_and_buffers() -> None:
    model = nn.BatchNorm1d(3)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    weight = float(hvd.rank() + 1)
    optimizer = hvd.LocalSGD(plain, every=1, buffers=model.buffers(), weight=lambda: weight)
    model.running_mean.fill_(hvd.rank())
    with torch.no_grad():
        model.weight.fill_(1.0)
    model(torch.ones(2, 3)).sum().backward()
    kept = model.running_mean.clone()
    with torch.no_grad():
        expected = hvd.allreduce(kept, name="expected", weight=weight)
    optimizer.step()
    assert torch.equal(model.running_mean, expected)
    for compression in (hvd.Compression.none, hvd.Compression.bf16):
        param = nn.Parameter(torch.zeros(300))
        plain = torch.optim.SGD([param], lr=1.0)
        optimizer = hvd.LocalSGD(plain, every=1, weight=weight, compression=compression)
        param.grad = torch.full((300,), -float(hvd.rank()))
        optimizer.step()
        ranks = range(hvd.size())
        mean = sum(rank * (rank + 1) for rank in ranks) / sum(rank + 1 for rank in ranks)
        near = 1e-2 if compression is hvd.Compression.bf16 else 1e-6
        assert_close([param], [torch.full((300,), mean)], near)


def scenario_local_steps_follow_averaged_gradients() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    take_steps(model, optimizer, 1, 5)
    state = optimizer.state_dict()
    del optimizer
    plain = sgd(model.parameters())
    plain.load_state_dict(state)
    optimizer = hvd.LocalSGD(plain, every=100)
    sent = counters()["bytes"]
    take_steps(model, optimizer, 6, 8)
    assert counters()["bytes"] - sent < 1000, counters()["bytes"] - sent
    optimizer.average()
    assert_same_everywhere(model)


def scenario_state_goes_on_to_the_bit() -> None:
    case = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    model = make_model()
    optimizer = hvd.LocalSGD(adamw(model.parameters()), **case)
    take_steps(model, optimizer, 1, 8)
    saved = pickle.loads(pickle.dumps([model.state_dict(), optimizer.state_dict()]))
    other = make_model()
    other.load_state_dict(saved[0])
    going_on = hvd.LocalSGD(adamw(other.parameters()), **case)
    going_on.load_state_dict(saved[1])
    for its_model, its_optimizer in [(model, optimizer), (other, going_on)]:
        take_steps(its_model, its_optimizer, 9, 21)
    assert_equal(other, list(model.parameters()))
    plain = adamw(make_model().parameters())
    plain.load_state_dict(saved[1])
    optimizer.average()
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.AdamW


def scenario_a_weight_is_not_negative() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model.parameters()), every=1, weight=-1.0)
    with raises("a weight is a finite number"):
        take_steps(model, optimizer, 1, 1)


def scenario_sparse_gradients() -> None:
    torch.manual_seed(1)
    model = nn.Embedding(8, 2, sparse=True)
    plain = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    optimizer = hvd.LocalSGD(plain, every=2)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank(), step])).square().sum().backward()
        optimizer.step()
    assert_same_everywhere(model)


def scenario_a_closure_is_this_ranks_own() -> None:
    model = make_model()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2 + hvd.rank())
    optimizer = hvd.LocalSGD(lbfgs, every=2)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_everywhere(model)


def scenario_an_overflow_on_one_rank_is_a_step_there_too() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model.parameters()), every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        scaler.scale(loss * float("inf") if step == 2 and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_everywhere(model)
    assert all(param.isfinite().all() for param in model.parameters())


def scenario_a_scaler_without_an_overflow_changes_nothing() -> None:
    model, other = make_model(), make_model()
    for one, scale in ((model, 64.0), (other, 1.0)):
        optimizer = hvd.LocalSGD(sgd(one.parameters()), every=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        for step in range(1, 10):
            optimizer.zero_grad()
            scaler.scale(loss_of(one, hvd.rank(), step)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_equal(model, list(other.parameters()))


def scenario_process_set() -> None:
    some = hvd.add_process_set(range(1, hvd.size()))
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model.parameters()), every=2, process_set=some)
    take_steps(model, optimizer, 1, 2)
    optimizer.average()
    everyone = hvd.allgather(model[0].bias.detach().unsqueeze(0))
    assert all(torch.equal(one, everyone[1]) for one in everyone[1:])
    assert not torch.equal(everyone[0], everyone[1])
    hvd.remove_process_set(some)


def scenario_half_precision_has_wide_anchors() -> None:
    model = make_model().bfloat16()
    optimizer = hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.01), every=2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 3), hvd.rank() + 1.0, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert_same_everywhere(model.float())
    anchors = optimizer.state_dict()["hvdlite.local_sgd"]["anchor"]
    assert all(anchor.dtype == torch.float32 for anchor in anchors)


def scenario_what_cannot_be_used() -> None:
    for arguments, text in [
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"outer_lr": 0.0}, "outer_lr is a positive number"),
        ({"outer_momentum": 1.0}, "less than 1"),
    ]:
        with raises(text):
            hvd.LocalSGD(sgd(make_model().parameters()), **arguments)
    with raises("takes an optimizer"):
        hvd.DiLoCo(make_model())  # type: ignore[arg-type]
    with raises("LocalSGD cannot be combined with Evaluating: its eval.* use hvd.Distributed"):
        hvd.LocalSGD(Evaluating(make_model().parameters()))
    with raises("nothing is left"):
        hvd.LocalSGD(hvd.DistributedOptimizer(sgd(make_model().parameters())))
    optimizer = hvd.DiLoCo(sgd(make_model().parameters()))
    with raises("already"):
        hvd.LocalSGD(optimizer)
    for other in (hvd.DistributedOptimizer, hvd.ShardedOptimizer):
        with raises("averages parameters already"):
            other(optimizer)


def scenario_other_arguments_on_another_rank() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model.parameters()), every=4 + (hvd.rank() == 1))
    loss_of(model, 0, 1).backward()
    with raises("has every="):
        optimizer.step()


def scenario_complex_parameters_keep_both_parts() -> None:
    for name in ("none", "bf16"):
        for dtype in (torch.complex64, torch.complex128):
            param = nn.Parameter(torch.zeros(4, dtype=dtype))
            compression = getattr(hvd.Compression, name)
            make = torch.optim.SGD([param], lr=1.0)
            optimizer = hvd.LocalSGD(make, every=1, compression=compression)
            param.grad = torch.full((4,), -1 - 2j, dtype=dtype)
            optimizer.step()
            right = torch.full((4,), 1 + 2j, dtype=dtype)
            assert torch.allclose(param, right), (name, param)


def with_batch_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train_on_own_data(model: nn.Module, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.randn(8, 3, generator=generator)) + hvd.rank()).square().mean().backward()
        optimizer.step()


def assert_equal_buffers(model: nn.Module) -> None:
    means = hvd.allgather(model[1].running_mean.unsqueeze(0))
    assert all(torch.equal(mean, means[0]) for mean in means), means


def scenario_buffers_are_averaged_before_the_first_round_too() -> None:
    model = with_batch_norm()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.LocalSGD(plain, every=10, buffers=model.buffers())
    train_on_own_data(model, optimizer)
    with raises(r"call optimizer.average\(\) on all ranks first"):
        optimizer.state_dict()
    optimizer.average()
    optimizer.state_dict()
    assert_equal_buffers(model)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_local_sgd = make_tests(body, sizes(2, 3))
