"""Layers that ranks share with DTensor, and pipelines, train over hvdlite as in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import hvdlite.torch as hvd
from parallel.scenarios import Later, make_tests, run_all, sizes
from parallel.torch.distributed.distributed_worlds import start

pytestmark = pytest.mark.long

PRELOAD = ("torch._dynamo",)
pipelining: Any = Later("torch.distributed.pipelining")  # It imports torch._dynamo.
STEPS = 4
SAMPLES = 16  # of all replicas together
WIDTH = 8
WORDS = 24
LENGTH = 12

Loss = Callable[[nn.Module, int], torch.Tensor]


def body() -> dict[str, str]:
    # torch warns of what it will rename, and of unused features of its own.
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore"))
    dist.destroy_process_group()
    return outcomes


def descent(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def train(model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Do all steps; `loss_of(model, step)` is the loss whose gradients this rank computes."""
    optimizer = optimizer or descent(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def trained_alone(model: nn.Module, loss_of: Loss) -> nn.Module:
    """Return a copy of the model that was trained in this process alone."""
    alone = copy.deepcopy(model)
    train(alone, loss_of)
    return alone


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def distance(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((whole(mine) - whole(right)).abs().max()) for mine, right in pairs)


def numbers(step: int, *shape: int) -> torch.Tensor:
    """Return the inputs or targets of one step, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(shape)))


def inputs_and_targets(step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = numbers(step, SAMPLES, width)
    return x, torch.tanh(x.roll(1, dims=1) + numbers(step, SAMPLES, 1))


class Network(nn.Module):
    """Two layers, of which ranks can share the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = inputs_and_targets(step, WIDTH)
    return functional.mse_loss(model(x), y)


def scenario_plain_collectives_refuse_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    split = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for call in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allgather,
        lambda tensor: hvd.broadcast_parameters({"split": tensor}, root_rank=0),
    ):
        with pytest.raises(hvd.ArgumentError, match="is a DTensor, which has no memory of its own"):
            call(split)
    model = parallelize_module(
        Network(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    optimizer = hvd.DistributedOptimizer(descent(model.parameters()), model.named_parameters())
    with pytest.raises(hvd.ArgumentError, match="is a DTensor, which has no memory of its own"):
        train(model, loss_of, optimizer)
    assert hvd.allgather(split.to_local()).tolist() == list(range(8))


class Language(nn.Module):
    """Embeds words, and says what the next word may be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.network = Network()
        self.last_norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(words))
        return self.output(self.last_norm(self.network(hidden)))


SEQUENCE_PARALLEL: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "network.up": ColwiseParallel(input_layouts=Shard(1)),
    "network.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "network": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False
    ),
    "last_norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def words_loss(model: nn.Module, step: int) -> torch.Tensor:
    words = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    logits = model(words)
    return functional.cross_entropy(logits.flatten(0, 1), (words * 5 + 1).flatten() % WORDS)


def scenario_sequence_parallel_words_and_loss_parallel() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    model = Language()
    expected = trained_alone(model, words_loss)
    parallelize_module(model, mesh, SEQUENCE_PARALLEL)
    with loss_parallel():
        train(model, words_loss)
    assert model.embedding.weight.to_local().shape == (WORDS // hvd.size(), WIDTH)
    assert distance(model, expected) < 1e-5


def network(stages: int) -> nn.Sequential:
    """Make a model of so many stages."""
    torch.manual_seed(8)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))
    )


class Pipeline:
    """This rank's stages of a model, of which each rank has several."""

    def __init__(self, parts: nn.Sequential, mesh: Any) -> None:
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
        self.schedule = pipelining.ScheduleInterleaved1F1B(
            self.stages, n_microbatches=8, loss_fn=functional.mse_loss
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


def scenario_a_pipeline_trains_as_one_process() -> None:
    parts = network(2 * hvd.size())
    expected = trained_alone(parts, loss_of)
    pipeline = Pipeline(parts, init_device_mesh("cpu", (hvd.size(),)))
    losses = pipeline.train()
    assert len(losses) == (STEPS if pipeline.has_last else 0)
    if losses:
        assert abs(losses[0] - float(loss_of(parts, 0))) < 1e-6
    right = nn.ModuleList([expected[number] for number in pipeline.numbers])
    assert distance(pipeline.modules, right) < 1e-6


test_model_parallelism = make_tests(body, sizes(4))
