"""Train on handwritten digits on a Ray cluster, by Ray Train: restarts go on from a checkpoint.

    python examples/ray_digits.py --workers 2

Ray joins the cluster that RAY_ADDRESS names, or starts one on this machine.
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from ray import train
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd
from hvdlite.ray import HvdliteTrainer

GLOBAL_BATCH = 48  # of all workers together
TEST_IMAGES = 357  # of 1,797


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images (64 pixels) and their digits, shuffled in the same way everywhere."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images[order], torch.tensor(digits.target)[order]


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Train on this worker's share of each global batch."""
    images, labels = (part[TEST_IMAGES:] for part in load())
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for mine in (batch[hvd.rank() :: hvd.size()] for batch in shuffled.split(GLOBAL_BATCH)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


def accuracy(model: nn.Module) -> float:
    """Return the share of the test images that the model recognises."""
    images, labels = (part[:TEST_IMAGES] for part in load())
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train_loop(config: dict) -> None:
    """What every worker runs."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, checkpoint = 0, train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt")
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for epoch in range(first, config["epochs"]):
        for group in sgd.param_groups:  # Half a cosine, from 0.1 to 0.
            group["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / config["epochs"]))
        train_epoch(model, optimizer, epoch)
        metrics = {"epoch": epoch, "accuracy": accuracy(model), "workers": hvd.size()}
        with tempfile.TemporaryDirectory() as folder:
            own = None
            if hvd.rank() == 0:  # All workers report, and rank 0 saves.
                state = {"model": model.state_dict(), "optimizer": sgd.state_dict()}
                torch.save({**state, "epoch": epoch}, Path(folder) / "model.pt")
                own = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits on a Ray cluster")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    result = HvdliteTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=train.ScalingConfig(num_workers=arguments.workers),
        run_config=train.RunConfig(
            storage_path=str(arguments.output.absolute()),
            failure_config=train.FailureConfig(max_failures=3),
        ),
    ).fit()
    best = result.metrics["accuracy"] if result.metrics else math.nan
    print(f"test accuracy {best:.1%} with {arguments.workers} workers")
