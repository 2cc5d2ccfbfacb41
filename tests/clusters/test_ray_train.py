"""Ray Train and Ray Tune: `HvdliteTrainer`, our backend of torch.distributed, and a search."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.ray_clusters import cluster

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    """A cluster whose workers know the functions of this file; its temporary folder."""
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with cluster(cpus=4) as folder:
        yield folder


def train_in_steps(config: dict[str, Any]) -> None:
    """Train four steps; rank 1 is killed after the second one of the first attempt."""
    import os
    import signal
    import tempfile

    import numpy as np
    from ray import train

    import hvdlite.numpy as hvd
    from hvdlite.rendezvous.environment import detect

    hvd.init()
    first, checkpoint = 0, train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            first = int((Path(saved) / "step").read_text()) + 1
    for step in range(first, 4):
        total = hvd.allreduce(np.array([hvd.rank() + 1.0]), op=hvd.Sum).item()
        with tempfile.TemporaryDirectory() as new:
            (Path(new) / "step").write_text(str(step))
            own = train.Checkpoint.from_directory(new) if hvd.rank() == 0 else None
            metrics = {"step": step, "first": first, "total": total, "epoch": detect().epoch}
            train.report(metrics, checkpoint=own)
        if config.get("kills") and step == 1 and detect().epoch == 0:
            # Ray then knows the one of this step.
            train.get_all_reported_checkpoints(timeout_s=120)
            if hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()


def test_trainer_goes_on_from_the_checkpoint_after_a_kill(folder: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from hvdlite.ray import HvdliteTrainer

    result = HvdliteTrainer(
        train_in_steps,
        train_loop_config={"kills": True},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder / "kill"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.metrics == {"step": 3, "first": 2, "total": 3.0, "epoch": 1}


def train_by_torch_distributed() -> None:
    """Train a step by DDP."""
    import torch
    from ray import train
    from ray.train import torch as ray_torch

    model = ray_torch.prepare_model(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    with_gradient = model.module.weight.grad is not None
    name = torch.distributed.get_backend()
    assert (name, total.item(), with_gradient) == ("hvdlite", 2.0, True)
    train.report({"total": total.item()})


def test_torch_trainer_takes_our_backend(folder: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train_by_torch_distributed,
        torch_config=TorchConfig(backend="hvdlite"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "torch")),
    ).fit()
