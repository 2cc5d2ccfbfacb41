"""Ranks with different numbers of batches: loops that end in hvd.join()."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import assert_close, assert_same_everywhere, make_model

PRELOAD = ("torch._dynamo",)
BATCH = 4


def steps_of(rank: int, turn: int = 0) -> int:
    """Return a rank's number of steps; in each round a different rank has the most."""
    return 2 * ((rank + turn) % hvd.size()) + 1


def active_in(step: int, turn: int = 0) -> list[int]:
    return [rank for rank in range(hvd.size()) if step < steps_of(rank, turn)]


def last_of(turn: int) -> int:
    return max(range(hvd.size()), key=lambda rank: steps_of(rank, turn))


def data_of(rank: int, turn: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    inputs = torch.randn(BATCH * steps_of(rank, turn), 3, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True).repeat(1, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_training(turns: int, weights: list[float] | None = None) -> list[list[torch.Tensor]]:
    """Compute in one process the results of ranks that average over active ones, by round."""
    model = make_model()
    optimizer = sgd(model)
    results = []
    for turn in range(turns):
        loaders = [iter(DataLoader(data_of(r, turn), BATCH)) for r in range(hvd.size())]
        for step in range(steps_of(last_of(turn), turn)):
            optimizer.zero_grad()
            active = active_in(step, turn)
            shares = [1.0 if weights is None else weights[rank] for rank in active]
            for rank, share in zip(active, shares, strict=True):
                inputs, targets = next(loaders[rank])
                loss = nn.functional.mse_loss(model(inputs), targets)
                (loss * share / sum(shares)).backward()
            optimizer.step()
        results.append([param.detach().clone() for param in model.parameters()])
        # As after the broadcast of the last rank's state.
    return results


def train(weight: float | None = None, **arguments: object) -> list[list[torch.Tensor]]:
    """Train as users do: a loop over this rank's batches, then join."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
    optimizer.weight = weight
    results = []
    for turn in range(3):
        for inputs, targets in DataLoader(data_of(hvd.rank(), turn), BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        last = hvd.join()
        assert steps_of(last, turn) == steps_of(last_of(turn), turn)
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        assert_same_everywhere(model)
        results.append([param.detach().clone() for param in model.parameters()])
    return results


def scenario_training_is_that_of_the_mean_over_active_ranks() -> None:
    expected = plain_training(3)
    for arguments, near in (
        ({}, 1e-5),
        ({"bucket_cap_mb": 1e-6}, 1e-5),
        ({"gradient_predivide_factor": 2.0}, 1e-5),
        ({"compression": hvd.Compression.bf16}, 2e-2),
    ):
        for ours, theirs in zip(train(**arguments), expected, strict=True):
            assert_close(ours, theirs, near)


def scenario_training_with_weights() -> None:
    weights = [float(rank + 1) for rank in range(hvd.size())]
    ours = train(weight=weights[hvd.rank()])
    for mine, theirs in zip(ours, plain_training(3, weights), strict=True):
        assert_close(mine, theirs)


def scenario_gradients_flow_among_active_ranks() -> None:
    for step in range(steps_of(hvd.rank())):
        active = active_in(step)
        tensor = torch.ones(2 * len(active), requires_grad=True)
        # Every rank's loss has its own factor; the gradient of a sum is the sum of the factors.
        hvd.allreduce(tensor, op=hvd.Sum).mul(hvd.rank() + 1).sum().backward()
        assert tensor.grad.tolist() == [sum(rank + 1 for rank in active)] * tensor.numel()
        tensor.grad = None
        for op, factor in ((hvd.Average, 1), (hvd.Sum, len(active))):
            hvd.reducescatter(tensor, op=op).sum().backward()
            assert_close([tensor.grad], [torch.full_like(tensor, factor)])
            tensor.grad = None
        (hvd.allgather(tensor) * (hvd.rank() + 1)).sum().backward()
        mean = sum(rank + 1 for rank in active) / len(active)
        assert_close([tensor.grad], [torch.full_like(tensor, mean)])
    hvd.join()


def scenario_operations_after_join_meet_with_or_without_names() -> None:
    for turn in range(hvd.size() + 1):
        for _ in range(steps_of(hvd.rank(), turn)):
            hvd.allreduce(torch.ones(1))
            hvd.allgather(torch.ones(1))
            hvd.allgather(torch.ones(1))
        hvd.join()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
        assert hvd.broadcast_object(hvd.rank(), hvd.size() - 1) == hvd.size() - 1
        named = hvd.allreduce(torch.ones(2), name="named", op=hvd.Sum)
        assert named.tolist() == [hvd.size()] * 2
        assert hvd.join() in range(hvd.size())
        assert hvd.join(device=0) in range(hvd.size())


def scenario_async_operations_from_before_a_join_count() -> None:
    handles = [hvd.allreduce_async(torch.ones(3), op=hvd.Sum) for _ in range(3)]
    hvd.join()
    for handle in handles:
        assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3


# Of each kind the gradients of all ranks are needed: none may be left out as late.
ACCUMULATING = {
    "passes": {"backward_passes_per_step": 2},
    "rows": {"backward_passes_per_step": 2},
    "view": {"backward_passes_per_step": 2, "gradient_as_bucket_view": True},
    "late": {"backward_passes_per_step": 2, "late": hvd.Late(quorum=1.0)},
    "no_sync": {},
}


def scenario_what_was_accumulated_before_join_is_reduced_after_it() -> None:
    for kind in ACCUMULATING:
        accumulate_before_join(kind)


def accumulate_before_join(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(40, 3, sparse=True) if kind == "rows" else nn.Linear(6, 5, bias=False)
    inputs = torch.tensor([hvd.rank(), 7]) if kind == "rows" else torch.randn(1, 6) + hvd.rank()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **ACCUMULATING[kind]
    )

    def accumulate() -> None:
        with optimizer.no_sync() if kind == "no_sync" else contextlib.nullcontext():
            model(inputs).sum().backward()

    def end_step() -> torch.Tensor:
        model(inputs).sum().backward()
        optimizer.step()
        gradient = model.weight.grad.to_dense().clone()
        optimizer.zero_grad()
        return gradient

    wanted = None
    for _ in range(3):
        accumulate()
        gradient = end_step()
        wanted = gradient if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, msg=lambda text: f"{kind}: {text}")
    # The data of the first rank end in the middle of a step.
    if hvd.rank() == 0:
        accumulate()
    hvd.join()
    for step in range(3):
        if hvd.rank() != 0 or step > 0:
            accumulate()
        gradient = end_step()
        torch.testing.assert_close(gradient, wanted, msg=lambda text: f"{kind}: {text}")


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_join = make_tests(body, on_hosts([0], [0, 0], [0, 0, 1]))
