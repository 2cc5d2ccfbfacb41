"""Process sets in torch: every collective over overlapping ones, gradients, the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)


def start() -> None:
    hvd.init(process_sets=[[0, 1], [1, 2], [0]])


def of(rank: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(rank + 1))


def mine(*shape: int) -> torch.Tensor:
    return of(hvd.rank(), *shape)


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


def scenario_every_collective_over_overlapping_sets() -> None:
    for ps in hvd.process_sets():
        ranks = ps.ranks
        if not ps.included():
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
            continue
        index = ps.rank()
        mean = sum(rank + 1 for rank in ranks) / len(ranks)
        total = mean * len(ranks)
        assert hvd.allreduce(mine(3), process_set=ps).tolist() == [mean] * 3
        assert hvd.allreduce(mine(3), op=hvd.Max, process_set=ps)[0] == ranks[-1] + 1
        assert hvd.allreduce_(mine(3), op=hvd.Sum, process_set=ps)[0] == total
        handle = hvd.allreduce_async(mine(9000), op=hvd.Sum, process_set=ps)
        in_place = hvd.allreduce_async_(mine(3), op=hvd.Sum, process_set=ps)
        assert hvd.synchronize(handle)[-1] == total
        assert hvd.synchronize(in_place)[-1] == total
        for grouped in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
            results = grouped([mine(2), mine(3)], op=hvd.Sum, process_set=ps)
            assert [one[-1] for one in results] == [total, total]
        for later in (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_):
            results = hvd.synchronize(later([mine(2)], op=hvd.Sum, process_set=ps))
            assert results[0][0] == total
        rows = torch.cat([of(rank, rank + 1, 2) for rank in ranks])
        assert torch.equal(hvd.allgather(mine(hvd.rank() + 1, 2), process_set=ps), rows)
        async_rows = hvd.allgather_async(mine(hvd.rank() + 1, 2), process_set=ps)
        assert torch.equal(hvd.synchronize(async_rows), rows)
        gathered = hvd.grouped_allgather([mine(1), mine(2)], process_set=ps)
        assert gathered[0].tolist() == [rank + 1 for rank in ranks]
        gathered = hvd.synchronize(hvd.grouped_allgather_async([mine(1)], process_set=ps))
        assert gathered[0].tolist() == [rank + 1 for rank in ranks]
        share = (5 - index + len(ranks) - 1) // len(ranks)
        for result in (
            hvd.reducescatter(mine(5, 2), op=hvd.Sum, process_set=ps),
            hvd.synchronize(hvd.reducescatter_async(mine(5, 2), op=hvd.Sum, process_set=ps)),
            hvd.grouped_reducescatter([mine(5, 2)], op=hvd.Sum, process_set=ps)[0],
        ):
            assert result.tolist() == [[total, total]] * share
        parts = torch.arange(len(ranks)).float().unsqueeze(1) + 10 * hvd.rank()
        received = [float(10 * rank + index) for rank in ranks]
        assert hvd.alltoall(parts, process_set=ps).squeeze(1).tolist() == received
        output, splits = hvd.synchronize(
            hvd.alltoall_async(parts, [1] * len(ranks), process_set=ps)
        )
        assert output.squeeze(1).tolist() == received
        assert splits.tolist() == [1] * len(ranks)
        for root in ranks:
            assert hvd.broadcast(mine(2), root, process_set=ps)[0] == root + 1
            assert hvd.broadcast_(mine(2), root, process_set=ps)[0] == root + 1
            assert (
                hvd.synchronize(hvd.broadcast_async(mine(2), root, process_set=ps))[0] == root + 1
            )
        with pytest.raises(hvd.ArgumentError, match="root_rank"):
            hvd.broadcast(mine(2), hvd.size(), process_set=ps)
        assert hvd.allgather_object(hvd.rank(), process_set=ps) == ranks
        assert hvd.broadcast_object([hvd.rank()], ranks[-1], process_set=ps) == [ranks[-1]]
        hvd.barrier(process_set=ps)


def scenario_gradients_flow_within_the_set() -> None:
    for ps in hvd.process_sets():
        if not ps.included():
            continue
        count, index = ps.size(), ps.rank()
        scale = sum(rank + 1.0 for rank in ps.ranks)

        def gradient_of(function: Any, rows: int, factor: float = hvd.rank() + 1.0) -> list[float]:
            tensor = torch.ones(rows, requires_grad=True)
            (function(tensor) * factor).sum().backward()
            return tensor.grad.tolist()  # type: ignore[no-any-return,union-attr]

        average = gradient_of(lambda x, ps=ps: hvd.allreduce(x, name="a", process_set=ps), 2)
        assert average == pytest.approx([scale / count] * 2)
        gathered = gradient_of(
            lambda x, ps=ps: hvd.allgather(x, name="g", process_set=ps), index + 1
        )
        assert gathered == pytest.approx([scale / count] * (index + 1))
        root = ps.ranks[-1]

        def share(x: torch.Tensor, ps: Any = ps, root: int = root) -> torch.Tensor:
            return hvd.broadcast(x, root, name="b", process_set=ps)

        shared = gradient_of(share, 2)
        assert shared == pytest.approx([scale / count if hvd.rank() == root else 0.0] * 2)
        swapped = gradient_of(lambda x, ps=ps: hvd.alltoall(x, name="s", process_set=ps), count)
        assert swapped == [rank + 1.0 for rank in ps.ranks]
        scattered = gradient_of(lambda x, ps=ps: hvd.reducescatter(x, process_set=ps), count)
        assert scattered == [rank + 1.0 for rank in ps.ranks]


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


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
    for ps in hvd.process_sets()[1:]:
        model, alone = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=ps
        )
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


def scenario_optimizer_of_a_set_keeps_it_in_copies_and_closures() -> None:
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
    copied = copy.deepcopy(optimizer)
    assert copied._reducer.settings.reduction.process_set is ps


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


def scenario_same_name_is_in_flight_in_several_sets() -> None:
    handles = [
        (ps, hvd.allreduce_async(mine(50_000), name="same", op=hvd.Sum, process_set=ps))
        for ps in hvd.process_sets()
        if ps.included()
    ]
    for ps, handle in reversed(handles):
        assert hvd.synchronize(handle)[-1] == sum(rank + 1 for rank in ps.ranks)


def _scenarios() -> dict[str, str]:
    return run_all(globals(), start)


test_scenario = make_tests(_scenarios, sizes(3, 4))
