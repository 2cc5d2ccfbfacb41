"""LocalSGD and DiLoCo together with other modes, against one process that simulates all ranks.

*Hosts* are process sets of two ranks. The replicas of the simulation are then the hosts, because
the ranks of a host average their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.modes.local_models import (
    engine_mean,
    loss_of,
    make_model,
    sgd,
    simulate,
    take_steps,
)
from parallel.torch.small_models import assert_close, assert_same_everywhere
from references import local_sgd

pytestmark = pytest.mark.long

PRELOAD = ("torch._dynamo",)
STEPS = 14
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def hosts() -> list[list[int]]:
    """Return the ranks of each host: two, or one that is left."""
    ranks = list(range(hvd.size()))
    return [ranks[first : first + 2] for first in ranks[::2]] if len(ranks) > 2 else [[0], [1]]


def replicas(count: int, loss: Loss, **arguments: Any) -> list[list[torch.Tensor]]:
    """Return the parameters of so many simulated replicas."""
    models = [make_model() for _ in range(count)]
    optimizers = [sgd(model.parameters()) for model in models]
    local_sgd.train(models, optimizers, loss, STEPS, engine_mean, **arguments)
    return [[param.detach() for param in model.parameters()] for model in models]


def scenario_rounds_that_travel_narrow() -> None:
    for compression, near in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
        for case in ({"every": 4}, {"every": 4, "outer_momentum": 0.5}):
            model = make_model()
            optimizer = hvd.LocalSGD(sgd(model.parameters()), compression=compression, **case)
            take_steps(model, optimizer, 1, STEPS)
            exact = simulate(sgd, STEPS, **case)[hvd.rank()]
            assert_close(list(model.parameters()), exact, near)
            optimizer.average()
            assert_same_everywhere(model)


def scenario_the_mean_after_a_join_is_of_those_that_go_on() -> None:
    for case in ({"every": 4}, {"every": 4, "compression": hvd.Compression.bf16}):
        param = nn.Parameter(torch.zeros(3))
        optimizer = hvd.LocalSGD(torch.optim.SGD([param], lr=1.0), **case)
        for _ in range(4 if hvd.rank() == 0 else 8):
            param.grad = torch.full((3,), -float(hvd.rank()))
            optimizer.step()
        last = hvd.join()
        ranks = range(hvd.size())
        first = 4 * sum(ranks) / len(ranks)
        goal = first + 4 * sum(ranks) / (len(ranks) - 1)
        expected = first if hvd.rank() == 0 else goal
        assert_close([param.detach()], [torch.full((3,), expected)], 1e-2)
        hvd.broadcast_parameters([("param", param)], root_rank=last)
        for _ in range(4):
            param.grad = torch.zeros(3)
            optimizer.step()
        assert_close([param.detach()], [torch.full((3,), goal)], 1e-2)


# Gradients within hosts, parameters between them.


def mean_of_host(loss: Loss) -> Loss:
    """Return the loss of a host: the mean of those of its ranks."""

    def mean(model: nn.Module, host: int, step: int) -> torch.Tensor:
        ranks = hosts()[host]
        return torch.stack([loss(model, rank, step) for rank in ranks]).mean()

    return mean


class Hosts:
    """The hosts' process sets, as long as a scenario needs them."""

    def __enter__(self) -> tuple[int, Any]:
        """Return the number and the process set of this rank's host."""
        self.sets = [hvd.add_process_set(ranks) for ranks in hosts()]
        mine = next(i for i, ranks in enumerate(hosts()) if hvd.rank() in ranks)
        return mine, self.sets[mine]

    def __exit__(self, *_: object) -> None:
        """Remove them."""
        for one in self.sets:
            hvd.remove_process_set(one)


def scenario_each_way_to_reduce_within_a_host() -> None:
    ways: list[tuple[Callable[..., Any], dict[str, Any], float]] = [
        (hvd.DistributedOptimizer, {}, 1e-5),
        (hvd.DistributedOptimizer, {"compression": hvd.Compression.bf16}, 2e-2),
        (hvd.DistributedOptimizer, {"gradient_as_bucket_view": True}, 1e-5),
        (hvd.ShardedOptimizer, {}, 1e-5),
    ]
    case = {"every": 4, "outer_lr": 0.8, "outer_momentum": 0.5}
    expected = replicas(len(hosts()), mean_of_host(loss_of), **case)
    with Hosts() as (host, members):
        weight = 1.0 / len(hosts()[host])
        for distribute, arguments, near in ways:
            model = make_model()
            optimizer = distribute(sgd(model.parameters()), process_set=members, **arguments)
            optimizer = hvd.LocalSGD(optimizer, weight=weight, **case)
            take_steps(model, optimizer, 1, STEPS)
            assert_close(list(model.parameters()), expected[host], near)
            optimizer.average()
            assert_same_everywhere(model)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_local_combinations = make_tests(body, sizes(3, 4))
