"""torch's own data and model parallelism trains over the backend hvdlite as in one process."""

from __future__ import annotations

import copy
import datetime
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.distributed.distributed_worlds import start

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
)
STEPS = 4
SAMPLES = 8


def body() -> dict[str, str]:
    # torch warns of what it will rename, and of unused features of its own.
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore"))
    dist.destroy_process_group()
    return outcomes


class Network(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.middle = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.middle(self.inner(x)))


def data(step: int, rank: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(samples, 6, generator=generator)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = data(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def alone(model: nn.Module, ranks: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Train in one process on the mean gradient of all ranks."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, step, rank) / ranks).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(model: nn.Module, parameters: Any = None, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()


def full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def check_parameters(model: nn.Module, expected: list[torch.Tensor], atol: float = 1e-6) -> None:
    for mine, right in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(full(mine), right, atol=atol), (full(mine) - right).abs().max()


def check_ddp(**arguments: Any) -> None:
    model = Network()
    expected = alone(model, hvd.size())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, **arguments)
    train(ddp)
    check_parameters(model, expected)


def scenario_ddp() -> None:
    check_ddp()
    check_ddp(gradient_as_bucket_view=True)
    check_ddp(static_graph=True)


def sharded(mesh: Any = None) -> nn.Module:
    model = Network()
    for layer in (model.inner, model.middle, model.outer):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def scenario_fsdp() -> None:
    expected = alone(Network(), hvd.size())
    model = sharded(init_device_mesh("cpu", (hvd.size(),)))
    train(model)
    check_parameters(model, expected)


def scenario_dtensor() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    torch.manual_seed(7)
    whole = torch.randn(8, 12)
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(by_rows.full_tensor(), whole)
    by_columns = by_rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(by_columns.to_local(), whole.chunk(hvd.size(), 1)[hvd.rank()])
    assert torch.equal(by_columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = by_rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    assert torch.allclose(product.full_tensor(), whole @ whole.t(), atol=1e-5)
    assert torch.allclose(by_rows.sum().full_tensor(), whole.sum(), atol=1e-4)


def scenario_timeouts_that_mean_no_limit() -> None:
    for seconds in (0, 1_000_001, 180_000_000):
        limit = datetime.timedelta(seconds=seconds)
        group = dist.new_group(backend="hvdlite", timeout=limit)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group, async_op=True).wait(limit)
        assert tensor.tolist() == [dist.get_world_size()] * 3
        dist.destroy_process_group(group)


def folder() -> str:
    """Return the name of a new folder, the same on all ranks."""
    names = [tempfile.mkdtemp(prefix="hvdlite dcp ") if hvd.rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    assert names[0] is not None
    return names[0]


def scenario_checkpoints() -> None:
    model = sharded(init_device_mesh("cpu", (hvd.size(),)))
    train(model)
    whole = [full(parameter) for parameter in model.parameters()]
    for save in (dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()):
        path = folder()
        save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        dist.barrier()
        other = sharded(init_device_mesh("cpu", (hvd.size(),)))
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=path)
        other.load_state_dict(state["model"])
        check_parameters(other, whole, atol=0)
        alone_state = {"model": Network().state_dict()}
        dcp.load(alone_state, checkpoint_id=path, no_dist=True)
        for mine, right in zip(alone_state["model"].values(), whole, strict=True):
            assert torch.equal(mine, right)
        dist.barrier()
        if hvd.rank() == 0:
            for file in Path(path).iterdir():
                if file.is_file():
                    file.unlink()


test_training = make_tests(body, sizes(2, 4))
