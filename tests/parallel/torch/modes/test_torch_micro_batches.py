"""DropCompute: steps equal one process that does the micro-batches of the record."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.optimizers import micro_batches
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import assert_close, assert_same_everywhere, make, make_model
from references import drop_compute

PRELOAD = ("torch._dynamo",)
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def micros(rank: int) -> Iterator[torch.Tensor]:
    """Yield micro-batches of 1 to 5 samples, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    for number in itertools.count():
        yield torch.randn(1 + (number + rank) % 5, 3, generator=generator)


def mean_loss(model: nn.Module, micro: torch.Tensor) -> torch.Tensor:
    return model(micro).square().mean()


def sum_loss(model: nn.Module, micro: torch.Tensor) -> torch.Tensor:
    return model(micro).square().sum()


def records() -> list[list[int]]:
    """The share of each rank in `uneven`: it depends on rank and step, and is 0 once."""
    return [[(step + rank) % 4 for step in range(8)] for rank in range(hvd.size())]


def train(
    model: nn.Module, optimizer: Any, loss: Loss, divisor: float, **arguments: Any
) -> list[int]:
    """Step 8 times with as many micro-batches as `records` allow on this rank."""
    data = micros(hvd.rank())
    for count in records()[hvd.rank()]:
        optimizer.zero_grad()
        limited = itertools.islice(data, count)
        for micro in optimizer.micro_batches(limited, most=3, **arguments):
            (loss(model, micro) / divisor).backward()
        reduced = torch.cat([param.grad.flatten() for param in model.parameters()])
        for theirs in hvd.allgather(reduced.unsqueeze(0)):  # before step(): one may clip them
            assert torch.equal(theirs, reduced)
        optimizer.step()
    return list(optimizer.done_micro_batches)


def expect(
    model: nn.Module, done: list[int], loss: Loss, rtol: float = 1e-6, **arguments: Any
) -> None:
    """Compare with the reference over the record of all ranks."""
    record = hvd.allgather(torch.tensor([done])).tolist()
    alone = make_model()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    data = [micros(rank) for rank in range(hvd.size())]
    drop_compute.train(alone, sgd, data, record, loss, **arguments)
    assert_same_everywhere(model)
    assert_close(list(model.parameters()), list(alone.parameters()), rtol)


def scenario_equals_one_process_over_the_record() -> None:
    for options in (
        {},
        {"bucket_cap_mb": 1e-6},
        {"gradient_as_bucket_view": True},
        {"reduce_in": "step"},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
    ):
        model = make_model()
        done = train(model, make(model, **options), mean_loss, 3, seconds=1000)
        assert done == records()[hvd.rank()]
        expect(model, done, mean_loss, 1e-2 if "compression" in options else 1e-6)


def scenario_samples_are_weighed() -> None:
    model = make_model()
    done = train(model, make(model), sum_loss, 1, seconds=1000, weigh=len)
    expect(model, done, sum_loss, weigh=len)


def scenario_slow_rank_does_less() -> None:
    model = make_model()
    optimizer, data = make(model), micros(hvd.rank())
    slow = hvd.rank() == hvd.size() - 1
    for _ in range(6):
        optimizer.zero_grad()
        for micro in optimizer.micro_batches(data, most=4, seconds=0.01):
            time.sleep(0.02 * slow)
            (mean_loss(model, micro) / 4).backward()
        optimizer.step()
    done = optimizer.done_micro_batches
    assert len(done) == 6
    assert all(1 <= count <= 4 for count in done)
    assert not slow or done == [1] * 6
    expect(model, done, mean_loss)
    share = float(hvd.allreduce(torch.tensor(float(sum(done))), op=hvd.Sum)) / (24 * hvd.size())
    assert optimizer.effective_speed_up(3.0, 1.5) == pytest.approx(2 * share)


def scenario_budget_is_measured() -> None:
    kept = micro_batches.MEASURED, micro_batches.PERIOD
    micro_batches.MEASURED, micro_batches.PERIOD = 3, 6
    try:
        model = make_model()
        optimizer, data = make(model), micros(hvd.rank())
        budgets = []
        for _ in range(11):
            optimizer.zero_grad()
            for micro in optimizer.micro_batches(data, most=3):
                time.sleep(0.01 * (hvd.rank() == 0))
                (mean_loss(model, micro) / 3).backward()
            optimizer.step()
            budgets.append(optimizer._micro_batches._budget)
    finally:
        micro_batches.MEASURED, micro_batches.PERIOD = kept
    done = optimizer.done_micro_batches
    assert done[:3] == done[6:9] == [3, 3, 3]
    assert budgets[1] == float("inf")
    assert 0 < budgets[2] < float("inf")
    assert budgets[8] != budgets[2]
    for theirs in hvd.allgather(torch.tensor([budgets], dtype=torch.float64)).tolist():
        assert theirs == budgets
    expect(model, done, mean_loss)


def scenario_joined_rank_does_not_count() -> None:
    model = make_model()
    optimizer, data = make(model), micros(hvd.rank())
    for step in range(3):
        if step == 1 and hvd.rank() == 0:
            break
        optimizer.zero_grad()
        count = 1 + hvd.rank()
        for micro in optimizer.micro_batches(itertools.islice(data, count), most=4, seconds=9):
            (mean_loss(model, micro) / 4).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    record = [[1 + rank] * 3 if rank else [1, 0, 0] for rank in range(hvd.size())]
    alone = make_model()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    drop_compute.train(alone, sgd, [micros(r) for r in range(hvd.size())], record, mean_loss)
    assert_close(list(model.parameters()), list(alone.parameters()), 1e-6)


def scenario_process_set_counts_its_members() -> None:
    first = list(range(hvd.size() - 1))
    members = hvd.add_process_set(first)
    model = make_model()
    optimizer, data = make(model, process_set=members), micros(hvd.rank())
    own = [1 + (step + hvd.rank()) % 3 for step in range(4)]
    for count in own:
        optimizer.zero_grad()
        limited = itertools.islice(data, count)
        for micro in optimizer.micro_batches(limited, most=3, seconds=1000, weigh=len):
            sum_loss(model, micro).backward()
        optimizer.step()
    assert optimizer.done_micro_batches == own
    ranks = first if hvd.rank() in first else [hvd.rank()]
    record = [[1 + (step + rank) % 3 for step in range(4)] for rank in ranks]
    alone = make_model()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    data_of_all = [micros(rank) for rank in ranks]
    drop_compute.train(alone, sgd, data_of_all, record, sum_loss, len)
    assert_close(list(model.parameters()), list(alone.parameters()), 1e-6)


def scenario_sparse_gradients() -> None:
    torch.manual_seed(0)
    table, alone = nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2)
    alone.load_state_dict(table.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    rows = [torch.tensor([rank, rank + 1]) for rank in range(hvd.size())]
    for _ in range(3):
        optimizer.zero_grad()
        count = 1 + hvd.rank()
        batches = iter([rows[hvd.rank()]] * count)
        for micro in optimizer.micro_batches(batches, most=4, seconds=1000):
            (table(micro).square().sum() / 4).backward()
        optimizer.step()
        plain.zero_grad()
        total = sum(range(1, hvd.size() + 1))
        for rank, micro in enumerate(rows):
            ((1 + rank) * alone(micro).square().sum() / total).backward()
        plain.step()
    assert_close(list(table.parameters()), list(alone.parameters()), 1e-6)


def scenario_scaler_skips_the_step_on_all_ranks() -> None:
    model = make_model()
    optimizer, data = make(model), micros(hvd.rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        optimizer.zero_grad()
        count = 1 + hvd.rank()  # all but the last rank reduce when the loop ends
        for micro in optimizer.micro_batches(itertools.islice(data, count), most=4, seconds=1000):
            bad = float("inf") if step == 1 and hvd.rank() == 0 else 1.0
            scaler.scale(bad * mean_loss(model, micro) / 4).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        before = [param.detach().clone() for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step == 0)
    assert scaler.get_scale() == 4.0
    assert_same_everywhere(model)


def scenario_backward_that_raises() -> None:
    model = make_model()
    optimizer, data = make(model, bucket_cap_mb=1e-6), micros(hvd.rank())

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("no gradient today")

    with pytest.raises(ValueError, match="no gradient today"):
        for micro in optimizer.micro_batches(data, most=1, seconds=1000):
            hidden = model[0](micro)
            if hvd.rank() == 0:
                hidden.register_hook(fail)
            model[2](model[1](hidden)).sum().backward()
        if hvd.rank() != 0:
            raise ValueError("no gradient today")
    optimizer.zero_grad()
    train(model, optimizer, mean_loss, 3, seconds=1000)
    assert_same_everywhere(model)


def scenario_no_rank_has_data() -> None:
    model = make_model()
    optimizer = make(model)
    assert list(optimizer.micro_batches(iter(()), most=2, seconds=1)) == []
    optimizer.step()
    assert optimizer.done_micro_batches == [0]
    assert_close(list(model.parameters()), list(make_model().parameters()))


def scenario_loop_that_was_left() -> None:
    model = make_model()
    optimizer, data = make(model), micros(hvd.rank())
    for micro in optimizer.micro_batches(data, most=3, seconds=1000):
        mean_loss(model, micro).backward()
        with pytest.raises(hvd.HvdliteError, match=r"zero_grad\(\) inside of a loop"):
            optimizer.zero_grad()
        break
    with pytest.raises(hvd.HvdliteError, match="has come to its end"):
        optimizer.step()
    with pytest.raises(hvd.HvdliteError, match="with gradients that are not zero"):
        next(optimizer.micro_batches(data, most=3, seconds=1000))
    optimizer.zero_grad()
    for step in range(2):  # without weights again
        optimizer.zero_grad(set_to_none=step == 0)
        mean_loss(model, torch.ones(1, 3)).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for micro in optimizer.micro_batches(data, most=3, seconds=1000):
        mean_loss(model, micro).backward()
    optimizer.step()
    assert optimizer.done_micro_batches == [3]
    assert_same_everywhere(model)


def scenario_collectives_in_forward_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4))
    optimizer = make(model)
    batches = iter([torch.ones(2, 3)] * 2)
    for micro in optimizer.micro_batches(batches, most=2, seconds=1000):
        with pytest.raises(hvd.ArgumentError, match="cannot be combined with SyncBatchNorm"):
            model(micro)
    optimizer.step()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


def scenario_arguments() -> None:
    def refused(text: str, most: Any = 2, seconds: Any = 1, **options: Any) -> None:
        optimizer = make(make_model(), **options)
        with pytest.raises(hvd.ArgumentError, match=text):
            optimizer.micro_batches(iter(()), most, seconds)

    refused("a step has at least 1", most=0)
    refused("give a positive time", seconds=0)
    refused("leave backward_passes_per_step at 1", backward_passes_per_step=2)
    refused("cannot be combined with op=hvd.Sum", op=hvd.Sum)
    refused("use op=hvd.Average", op=hvd.Adasum)
    refused("cannot be combined with weight=: it sets the weight", weight=2.0)
    model = make_model()
    optimizer = make(model)
    with pytest.raises(hvd.ArgumentError, match="takes an iterator, not a list"):
        optimizer.micro_batches([1], most=2)
    assert optimizer.done_micro_batches == []
    with pytest.raises(hvd.HvdliteError, match="before the first loop"):
        optimizer.effective_speed_up(1.0, 1.0)
    loop = optimizer.micro_batches(micros(0), most=2 + (hvd.rank() == 1), seconds=1)
    with pytest.raises(hvd.MismatchError, match=r"most is \d on rank \d and \d on rank \d; give"):
        next(loop)
    for micro in optimizer.micro_batches(micros(0), most=2, seconds=1000):
        mean_loss(model, micro).backward()
        with pytest.raises(hvd.HvdliteError, match="inside of a loop over micro_batches"):
            next(optimizer.micro_batches(micros(0), most=2, seconds=1000))
    with pytest.raises(hvd.ArgumentError, match="call step\\(\\) without a closure"):
        optimizer.step(lambda: None)


def slow_loop(optimizer: Any, backward_calls: Callable[[int], int]) -> torch.Tensor:
    """Do micro-batches until the time is up, with several losses; return the gradient."""
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    for number, _ in enumerate(optimizer.micro_batches(iter(range(99)), most=20, seconds=0.02)):
        calls = backward_calls(number)
        for _ in range(calls):
            (param * (hvd.rank() + 1) / calls / 20).sum().backward()
        time.sleep(0.004)
    optimizer.step()
    return param.grad


def scenario_several_backward_calls_in_each_micro_batch() -> None:
    for calls in (2, 3):
        param = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
        for _ in range(6):
            gradient = slow_loop(optimizer, lambda number, calls=calls: calls)
            done = hvd.allgather(torch.tensor([float(optimizer.done_micro_batches[-1])]))
            ranks = torch.arange(1.0, hvd.size() + 1)
            assert torch.allclose(gradient, (done * ranks).sum() / done.sum()), (gradient, done)


def scenario_more_backward_calls_than_before_are_refused() -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
    with pytest.raises(hvd.HvdliteError, match="calls backward.. more than once, as those"):
        optimizer.zero_grad()
        for number, _ in enumerate(optimizer.micro_batches(iter(range(3)), most=3, seconds=60.0)):
            for _ in range(1 + number // 2):
                param.sum().backward()
    optimizer.zero_grad()
    hvd.barrier()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_micro_batches = make_tests(body, sizes(2, 3, 4))
