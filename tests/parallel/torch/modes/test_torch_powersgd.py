"""PowerSGD equals its reference, gives all ranks the same bits, and sends what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import (
    assert_close,
    assert_same_everywhere,
    counters,
    make,
    raises,
)
from references.powersgd import train

PRELOAD = ("torch._dynamo",)
STEPS = 25


def model_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 5)]
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, size: int = 16) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=numbers).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :5].sin() - rank).square().mean()


def powersgd(rank: int = 2, start: int = 2, least_gain: float = 1.5) -> Any:
    return hvd.Compression.powersgd(rank=rank, start=start, least_gain=least_gain)


def compressed(model: nn.Module, compression: Any = None, **arguments: Any) -> Any:
    return make(model, lr=0.05, compression=compression or powersgd(), **arguments)


def run(model: nn.Module, optimizer: Any, steps: Sequence[int] = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()


def reference(
    steps: Sequence[int] = range(STEPS),
    dtype: torch.dtype = torch.float64,
    compression: Any = None,
    weights: Callable[[int], Sequence[float]] | None = None,
    loss: Any = loss_of,
) -> list[torch.Tensor]:
    model = model_of(dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ones = [1.0] * hvd.size()
    train(model, sgd, loss, steps, compression or powersgd(), weights or (lambda step: ones))
    return list(model.parameters())


def assert_equal(model: nn.Module, expected: list[torch.Tensor], near: float = 1e-9) -> None:
    assert_close(list(model.parameters()), expected, near)
    assert_same_everywhere(model)


def errors_of(optimizer: Any) -> list[torch.Tensor]:
    return [
        matrix.error
        for bucket in optimizer._reducer.exchange._buckets
        for matrix in bucket.low_rank._matrices.values()
        if matrix.error is not None
    ]


def scenario_equals_the_reference() -> None:
    for compression in (powersgd(), powersgd(rank=1, start=1), powersgd(rank=4, least_gain=1.0)):
        model = model_of()
        optimizer = compressed(model, compression)
        run(model, optimizer)
        assert errors_of(optimizer)
        assert_equal(model, reference(compression=compression))
    model = model_of(torch.float32)
    run(model, compressed(model))
    assert_equal(model, reference(dtype=torch.float32), 1e-5)


def scenario_other_ways_to_reduce() -> None:
    expected = reference()
    for arguments in (
        {"num_groups": 1},
        {"num_groups": 6},
        {"gradient_as_bucket_view": True},
        {"gradient_predivide_factor": 2.0},
        {"bucket_cap_mb": 0.001},
    ):
        model = model_of()
        run(model, compressed(model, **arguments))
        assert_equal(model, expected)
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run(model, hvd.ShardedOptimizer(sgd, compression=powersgd()))
    assert_equal(model, expected)


def scenario_accumulated_gradients() -> None:
    def halves(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return loss_of(model, 2 * step, rank) + loss_of(model, 2 * step + 1, rank)

    model = model_of()
    optimizer = compressed(model, backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, 2 * step, hvd.rank()).backward()
        loss_of(model, 2 * step + 1, hvd.rank()).backward()
        optimizer.step()
    assert_equal(model, reference(loss=halves))


def scenario_weights_that_change() -> None:
    def weights(step: int) -> list[float]:
        return [float((step + 2 * rank) % 4) for rank in range(hvd.size())]

    model = model_of()
    optimizer = compressed(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.weight = weights(step)[hvd.rank()]
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    assert_equal(model, reference(weights=weights))


def scenario_same_bits_whatever_the_threads() -> None:
    # Torch and its libraries sum in another order with more threads, as they do on other CPUs.
    before = torch.get_num_threads()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.Tanh(), nn.Linear(700, 200))
    optimizer = compressed(model, powersgd(rank=3, start=1))
    torch.set_num_threads(1 + hvd.rank() % 2)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(9 * step + hvd.rank()))
        model(x).square().mean().backward()
        optimizer.step()
    torch.set_num_threads(before)
    assert len(errors_of(optimizer)) == 2
    assert_same_everywhere(model)


class Picture(nn.Module):
    """Has a convolution."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(8, 16, 3), nn.Linear(16, 3)
        self.to(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x.to(self.last.weight)).tanh().mean((2, 3)))
        return result


def picture(view: bool = False, **options: Any) -> Picture:
    """Train one."""
    model = Picture(**options)
    compression = hvd.Compression.powersgd(rank=1, start=1)
    optimizer = compressed(model, compression, gradient_as_bucket_view=view)
    for step in range(6):
        optimizer.zero_grad()
        numbers = torch.Generator().manual_seed(step + 10 * hvd.rank())
        model(torch.randn(2, 8, 6, 6, generator=numbers)).square().mean().backward()
        optimizer.step()
    assert len(errors_of(optimizer)) == 2
    assert_same_everywhere(model)
    return model


def scenario_other_memory_formats_and_dtypes() -> None:
    expected = list(picture().parameters())
    for view in (False, True):
        model = picture(view, memory_format=torch.channels_last)
        weight = model.first.weight
        assert weight.grad.stride() == weight.stride() != expected[0].stride()
        assert torch.linalg.matrix_rank(weight.grad.reshape(16, -1)) == 1
        assert_close(list(model.parameters()), expected)
        model = picture(view, dtype=torch.bfloat16)
        assert model.first.weight.grad.dtype == torch.bfloat16
        assert_close([param.float() for param in model.parameters()], expected, 0.02)


def scenario_an_overflow_leaves_no_trace() -> None:
    model = model_of(torch.float32)
    optimizer = compressed(model)
    run(model, optimizer, range(6))
    before = [error.clone() for error in errors_of(optimizer)]
    assert before
    for value in (math.inf, math.nan):
        optimizer.zero_grad()
        factor = value if hvd.rank() == 0 else 1.0
        (loss_of(model, 6, hvd.rank()) * factor).backward()
        assert not model[0].weight.grad.isfinite().all()
        assert not model[4].weight.grad.isfinite().any()
    optimizer.zero_grad()
    assert all(map(torch.equal, before, errors_of(optimizer)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for step in range(6, 16):
        optimizer.zero_grad()
        loss = loss_of(model, step, hvd.rank()) * (1e4 if step < 8 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**125
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    assert_same_everywhere(model)


def scenario_a_gradient_of_zeros_does_not_end_it() -> None:
    model = model_of()
    optimizer = compressed(model, powersgd(start=1))
    run(model, optimizer, range(3))
    for error in errors_of(optimizer):
        error.zero_()
    optimizer.zero_grad()
    (loss_of(model, 3, hvd.rank()) * 0.0).backward()
    assert not model[0].weight.grad.any()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 4, hvd.rank()).backward()
    assert model[0].weight.grad.any()


class Partly(nn.Module):
    """Has a sparse table, a layer that few steps use, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 20, sparse=True)
        self.used, self.rare, self.never = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.used(self.table(x)).tanh()
        return self.rare(x) if rare else x


def scenario_sparse_and_absent_gradients() -> None:
    model = Partly()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        compression=hvd.Compression.powersgd(rank=1, start=1),
    )
    for step in range(8):
        optimizer.zero_grad()
        rare = step == 1 or (step > 3 and hvd.rank() == 0)
        x = torch.randint(40, (6,), generator=torch.Generator().manual_seed(step + hvd.rank()))
        model(x, rare).square().mean().backward()
        assert model.table.weight.grad.is_sparse
        assert model.never.weight.grad is None
        assert (model.rare.weight.grad is None) == (step not in (1, 4, 5, 6, 7))
        if model.rare.weight.grad is not None and step > 1:
            assert torch.linalg.matrix_rank(model.rare.weight.grad) == 1
        optimizer.step()
    assert len(errors_of(optimizer)) == 2
    assert_same_everywhere(model)


def scenario_a_backward_that_raises() -> None:
    model = model_of()
    optimizer = compressed(model)
    run(model, optimizer, range(4))

    def fail(_: torch.Tensor) -> None:
        raise ValueError("out of luck")

    before = [error.clone() for error in errors_of(optimizer)]
    hook = model[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="out of luck"):
        loss_of(model, 4, hvd.rank()).backward()
    hook.remove()
    optimizer.zero_grad()
    assert all(map(torch.equal, before, errors_of(optimizer)))
    run(model, optimizer, range(4, STEPS))
    assert_equal(model, reference())


def scenario_two_optimizers_end_in_different_orders() -> None:
    for idle in (False, True):
        first, last, plain = model_of(), model_of(), model_of()
        optimizers = [compressed(one, powersgd(start=1)) for one in (first, last)]
        optimizers.append(make(plain, lr=0.05))
        for step in range(6):
            models = [first, last, plain]
            if hvd.rank() % 2 == 1:
                models.reverse()  # Then the other one's gradients come first in backward.
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step)).double()
            total = torch.zeros(16, 5).double()
            for model in models:
                total = total + model(torch.cat([x[:, :15], total.tanh()], 1))
            if not (idle and hvd.rank() == 0):
                total.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model in (first, last, plain):
            assert_same_everywhere(model)


def scenario_a_loaded_state_begins_without_errors() -> None:
    model = model_of()
    optimizer = compressed(model)
    run(model, optimizer, range(5))
    assert errors_of(optimizer)
    state = optimizer.state_dict()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.load_state_dict(state)
    optimizer.load_state_dict(state)
    assert not errors_of(optimizer)
    run(model, optimizer, range(5, 8))
    assert_same_everywhere(model)


def scenario_another_layout_begins_without_errors() -> None:
    model = model_of()
    optimizer = compressed(model)
    run(model, optimizer, range(5))
    model[2].weight.requires_grad_(False)
    run(model, optimizer, range(5, 6))
    assert not errors_of(optimizer)  # This step was exact.
    run(model, optimizer, range(6, 7))
    assert len(errors_of(optimizer)) == 2
    assert_same_everywhere(model)


def scenario_ranks_that_join() -> None:
    model = model_of()
    optimizer = compressed(model, powersgd(start=4))
    run(model, optimizer, range(3 + 3 * hvd.rank()))  # Rank 0 leaves before it has compressed.
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    run(model, optimizer, range(1))
    assert not errors_of(optimizer)
    run(model, optimizer, range(1, 3))
    assert errors_of(optimizer)
    assert_same_everywhere(model)


def scenario_members_of_a_process_set() -> None:
    if hvd.size() > 2:
        members = hvd.add_process_set([0, 1])
        model = model_of()
        run(model, compressed(model, process_set=members))
        if members.included():
            expected = reference(weights=lambda step: [1.0, 1.0])
            assert_close(list(model.parameters()), expected, 1e-9)
        hvd.remove_process_set(members)
    alone = hvd.add_process_set([hvd.size() - 1])
    model = model_of()
    optimizer = compressed(model, process_set=alone)
    run(model, optimizer, range(4))
    assert not errors_of(optimizer)  # One rank has nothing to send.
    hvd.remove_process_set(alone)


def scenario_fewer_bytes() -> None:
    def sent(optimizer: Any, model: nn.Module) -> int:
        run(model, optimizer, range(3))
        begin = counters()["bytes"]
        run(model, optimizer, range(3, 7))
        return (counters()["bytes"] - begin) // 4

    model, exact = model_of(), model_of()
    saved = sent(make(exact), exact) - sent(compressed(model), model)
    matrices = [param.shape for param in model.parameters() if param.dim() == 2]
    gone = 8 * sum(math.prod(shape) - 2 * sum(shape) for shape in matrices)
    assert 0.98 * gone < saved <= gone
    assert gone > 0.6 * 8 * sum(param.numel() for param in model.parameters())


def scenario_ranks_that_differ_get_an_error() -> None:
    model = model_of()
    optimizer = compressed(model, powersgd(rank=1 + hvd.rank() % 2))
    with raises("rank 0 has compression=powersgd.rank=1.* and rank 1 has compression=powersgd"):
        run(model, optimizer, range(1))
    model = model_of()
    optimizer = compressed(model, powersgd() if hvd.rank() == 0 else hvd.Compression.none)
    with raises("rank 0 has compression=powersgd.* and rank 1 has compression=None; give every"):
        run(model, optimizer, range(1))
    for cap in (0.001, 4.0):
        model = model_of()
        optimizer = compressed(model, bucket_cap_mb=cap)
        run(model, optimizer, range(4))
        if hvd.rank() == 0:
            model[4].weight.requires_grad_(False)
        with raises("the parameter '4.weight' is trained on .*rank.* and not on rank 0"):
            run(model, optimizer, range(4, 5))
        model[4].weight.requires_grad_(True)
        run(model, optimizer, range(5, 7))
        assert_same_everywhere(model)


def scenario_refusals() -> None:
    model = model_of()
    for op in (hvd.Sum, hvd.Adasum):
        with raises("Compression.powersgd cannot be combined with op=hvd."):
            compressed(model, op=op)
    with raises("make the compression: hvd.Compression.powersgd"):
        compressed(model, hvd.Compression.powersgd)
    with raises("is for the gradients of hvd.DistributedOptimizer, which keeps"):
        hvd.allreduce(torch.ones(4, 4), compression=powersgd())
    for arguments in ({"rank": 0}, {"start": 0}, {"rank": 1.5}, {"rank": True}):
        with raises("give a whole number, 1 or more"):
            hvd.Compression.powersgd(**arguments)
    with raises("give the factor by which a gradient must become smaller"):
        hvd.Compression.powersgd(least_gain=0.5)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals(), hvd.init)


test_powersgd = make_tests(body, on_hosts([0, 0], [0, 1, 1]))
