"""torch's pipeline schedules over the backend hvdlite train as one process does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import hvdlite.torch as hvd
from parallel.scenarios import Later, make_tests, run_all, sizes
from parallel.torch.distributed.distributed_worlds import start
from parallel.torch.models.references import (
    STEPS,
    descent,
    distance,
    inputs_and_targets,
    trained_alone,
)

pytestmark = pytest.mark.long

PRELOAD = ("torch._dynamo",)
pipelining: Any = Later("torch.distributed.pipelining")  # It imports torch._dynamo.
WIDTH = 8


def body() -> dict[str, str]:
    # torch warns of what it will rename, and of unused features of its own.
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore"))
    dist.destroy_process_group()
    return outcomes


def network(stages: int) -> nn.Sequential:
    """Make a model of so many stages."""
    torch.manual_seed(8)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))
    )


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = inputs_and_targets(step, WIDTH)
    return functional.mse_loss(model(x), y)


class Pipeline:
    """This rank's stages of a model, under a schedule."""

    def __init__(
        self, kind: Any, parts: nn.Sequential, mesh: DeviceMesh, micro_batches: int
    ) -> None:
        ranks, own = mesh.size(), mesh.get_local_rank()
        self.numbers = range(own, len(parts), ranks)
        self.has_last = self.numbers[-1] == len(parts) - 1
        self.modules = nn.ModuleList([copy.deepcopy(parts[number]) for number in self.numbers])
        self.stages = [
            pipelining.PipelineStage(
                module, number, len(parts), torch.device("cpu"), group=mesh.get_group()
            )
            for module, number in zip(self.modules, self.numbers, strict=True)
        ]
        looped = kind is pipelining.ScheduleInterleaved1F1B
        self.schedule = kind(
            self.stages if looped else self.stages[0],
            n_microbatches=micro_batches,
            loss_fn=functional.mse_loss,
        )

    def train(self) -> list[float]:
        """Do all steps; return the losses, if this is the last stage."""
        optimizer, losses = descent(self.modules.parameters()), []
        for step in range(STEPS):
            x, y = inputs_and_targets(step, WIDTH)
            optimizer.zero_grad()
            losses += [float(one) for one in [self._step(x, y)] if one is not None]
            optimizer.step()
        return losses

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        micro_losses: list[torch.Tensor] = []
        given = (x,) if self.numbers[0] == 0 else ()
        target = {"target": y, "losses": micro_losses} if self.has_last else {}
        self.schedule.step(*given, **target)
        return torch.stack(micro_losses).mean() if micro_losses else None


def check(kind: Any, loops: int, micro_batches: int) -> None:
    parts = network(loops * hvd.size())
    expected = trained_alone(parts, loss_of)
    pipeline = Pipeline(kind, parts, init_device_mesh("cpu", (hvd.size(),)), micro_batches)
    losses = pipeline.train()
    assert len(losses) == (STEPS if pipeline.has_last else 0)
    if losses:
        assert abs(losses[0] - float(loss_of(parts, 0))) < 1e-6
    right = nn.ModuleList([expected[number] for number in pipeline.numbers])
    assert distance(pipeline.modules, right) < 1e-6


def scenario_one_forward_one_backward() -> None:
    check(pipelining.Schedule1F1B, loops=1, micro_batches=8)


def scenario_interleaved() -> None:
    check(pipelining.ScheduleInterleaved1F1B, loops=2, micro_batches=8)


test_pipelines = make_tests(body, sizes(4))
