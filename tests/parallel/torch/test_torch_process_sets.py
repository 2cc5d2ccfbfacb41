"""Process sets in torch: the optimizer, its state, and batch norm over overlapping ones.

Collectives and their gradients over sets are in `test_collective_table` and `test_torch_gradients`.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import make_model

PRELOAD = ("torch._dynamo",)


def start() -> None:
    hvd.init(process_sets=[[0, 1], [1, 2], [0]])


def mine(*shape: int) -> torch.Tensor:
    return torch.full(shape, float(hvd.rank() + 1))


def scenario_calls_of_a_rank_outside_are_errors() -> None:
    for ps in hvd.process_sets():
        if ps.included():
            continue
        for call in (
            lambda ps=ps: hvd.allreduce(mine(2), process_set=ps),
            lambda ps=ps: hvd.allreduce_async_(mine(2), name="x", process_set=ps),
            lambda ps=ps: hvd.allgather(mine(2), process_set=ps),
            lambda ps=ps: hvd.alltoall(mine(2), name="x", process_set=ps),
            lambda ps=ps: hvd.reducescatter(mine(2), process_set=ps),
            lambda ps=ps: hvd.broadcast(mine(2), ps.ranks[0], name="x", process_set=ps),
            lambda ps=ps: hvd.barrier(process_set=ps),
            lambda ps=ps: hvd.broadcast_parameters({"x": mine(2)}, ps.ranks[0], ps),
        ):
            with pytest.raises(hvd.ArgumentError, match=f"rank {hvd.rank()} is not a member"):
                call()


def scenario_sparse_gradients_and_adasum_stay_in_their_set() -> None:
    pair = hvd.process_sets()[1]
    model = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    weight = torch.nn.Parameter(torch.zeros(2))
    sparse = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), process_set=pair, op=hvd.Average
    )
    adasum = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), process_set=pair, op=hvd.Adasum
    )
    for _ in range(2):
        sparse.zero_grad()
        model(torch.tensor([hvd.rank()])).sum().backward()
        sparse.step()
    weight.grad = torch.nn.functional.one_hot(torch.tensor(hvd.rank() % 2), 2).float()
    adasum.step()
    if pair.included():  # by Adasum, orthogonal updates add up
        torch.testing.assert_close(
            model.weight.detach()[:, 0], torch.tensor([-1.0, -1.0, 0.0, 0.0])
        )
        torch.testing.assert_close(weight.detach(), torch.tensor([-1.0, -1.0]))
        rows = hvd.sparse_allreduce_async(
            torch.eye(3)[hvd.rank() : hvd.rank() + 1].to_sparse(), op=hvd.Sum, process_set=pair
        )
        torch.testing.assert_close(rows().to_dense(), torch.tensor([[1.0, 1.0, 0.0]]))
    else:
        expected = torch.zeros(4)
        expected[hvd.rank()] = -2.0
        torch.testing.assert_close(model.weight.detach()[:, 0], expected)
        step = -torch.nn.functional.one_hot(torch.tensor(hvd.rank() % 2), 2).float()
        torch.testing.assert_close(weight.detach(), step)


def train(model: torch.nn.Module, optimizer: Any, ranks: list[int], steps: int = 4) -> None:
    """Step over the data of these ranks."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(hvd.size(), 2, 3, generator=generator)
        optimizer.zero_grad()
        model(data[ranks].flatten(0, 1)).square().mean().backward()
        optimizer.step()


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def scenario_optimizer_reduces_over_its_set_alone() -> None:
    """Members train as one process on their data; the other ranks as without hvdlite."""
    for ps, view in itertools.product(hvd.process_sets()[1:], (False, True)):
        model, alone = make_model(), make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, process_set=ps, gradient_as_bucket_view=view)
        train(model, optimizer, [hvd.rank()])
        ranks = ps.ranks if ps.included() else [hvd.rank()]
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), ranks)
        assert equal(model, alone)


def scenario_two_optimizers_of_model_and_data_parallel_parts() -> None:
    """Rank 1 trains in two process sets at once, and all ranks share a third model."""
    models, optimizers = [], []
    for ps in hvd.process_sets():
        model = make_model()
        models.append(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizers.append(hvd.DistributedOptimizer(sgd, process_set=ps))
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(hvd.size(), 2, 3, generator=generator)[hvd.rank()]
        loss = sum(model(data).square().mean() for model in models)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        for optimizer in reversed(optimizers):
            optimizer.step()
    for ps, model in zip(hvd.process_sets(), models, strict=True):
        alone = make_model()
        ranks = ps.ranks if ps.included() else [hvd.rank()]
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), ranks)
        assert equal(model, alone)


def scenario_optimizer_of_a_set_averages_the_losses_of_closures_over_it() -> None:
    ps = hvd.process_sets()[2]
    model = make_model()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    optimizer = hvd.DistributedOptimizer(lbfgs, process_set=ps)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(mine(2, 3)).square().mean()
        loss.backward()
        seen.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    if ps.included():
        assert hvd.allgather_object(loss.item(), process_set=ps) == [loss.item()] * ps.size()
    else:
        assert loss.item() == seen[0]


def scenario_state_is_broadcast_within_the_set() -> None:
    ps = hvd.process_sets()[2]
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if ps.included():
        hvd.broadcast_parameters(model.state_dict(), root_rank=2, process_set=ps)
        hvd.broadcast_optimizer_state(optimizer, root_rank=2, process_set=ps)
    expected = 2 if ps.included() else hvd.rank()
    assert model.weight.flatten().tolist() == [expected, expected]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (expected + 1))


def scenario_batch_norm_over_a_set() -> None:
    for ps in hvd.process_sets():
        if not ps.included():
            continue
        layer = hvd.SyncBatchNorm(2, process_set=ps).double()
        plain = torch.nn.BatchNorm1d(2).double()
        whole = torch.randn(hvd.size(), 4, 2, generator=torch.Generator().manual_seed(3)).double()
        expected = plain(whole[ps.ranks].flatten(0, 1)).unflatten(0, (ps.size(), 4))
        assert torch.allclose(layer(whole[hvd.rank()]), expected[ps.rank()])
        converted = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2), ps)
        assert converted.process_set is ps
        assert copy.deepcopy(converted).process_set is ps


def _scenarios() -> dict[str, str]:
    return run_all(globals(), start)


test_scenario = make_tests(_scenarios, sizes(3))
