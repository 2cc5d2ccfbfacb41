"""Train a small convolutional network on handwritten digits, on any number of ranks.

    python examples/torch_digits.py
    hvdlite-run -np 2 python examples/torch_digits.py

The global batch is the same on any number of ranks, and so is the loss curve: demo-output/loss.png
shows those of all runs.
"""

import argparse
import time
from pathlib import Path

import torch
from results import Result, draw, save, sentence  # beside this file
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd

GLOBAL_BATCH = 48  # of all ranks together: for 1, 2, 3, 4, 6... ranks
TEST_IMAGES = 357  # of 1,797


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images (8x8 pixels) and their digits, shuffled in the same way everywhere."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order].to(device), torch.tensor(digits.target)[order].to(device)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, epochs: int
) -> tuple[torch.Tensor, list[float]]:
    """Train on this rank's share of each global batch; return its losses, and seconds by epoch."""
    images, labels = (part[TEST_IMAGES:] for part in load(model[0].weight.device))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    losses, seconds = [], []
    for epoch in track(range(epochs), f"{hvd.size()} rank(s)", disable=hvd.rank() != 0):
        began = time.perf_counter()
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in shuffled.split(GLOBAL_BATCH):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            hvd.observe(samples=len(mine), loss=losses[-1])
        scheduler.step()
        losses[-1].item()  # This waits for the GPU, if there is one.
        seconds.append(time.perf_counter() - began)
    return torch.stack(losses).cpu(), seconds


def accuracy(model: nn.Sequential) -> float:
    """Return the share of the test images that the model recognises."""
    images, labels = (part[:TEST_IMAGES] for part in load(model[0].weight.device))
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    hvd.init()
    best = "cuda" if torch.cuda.device_count() >= hvd.local_size() else "cpu"  # a GPU for each rank
    parser.add_argument("--device", default=best)
    arguments = parser.parse_args()
    model = make_model().to(arguments.device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    losses, seconds = train(model, optimizer, arguments.epochs)
    losses = hvd.allreduce(losses, name="losses").tolist()
    if hvd.rank() == 0:
        result = Result(hvd.size(), losses, seconds, accuracy(model))
        results = save(result, arguments.output, "digits")
        draw(results, arguments.output / "loss.png")
        print(sentence(result, results))
