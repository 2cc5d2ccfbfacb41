"""Train a small convolutional network on handwritten digits, on any number of ranks.

    hvdlite-run -np 2 python examples/torch_digits.py --compare

The global batch is the same on any number of ranks, and so is the loss curve. With --compare, rank
0 first trains alone on whole batches, and demo-output/loss.png shows both curves.
"""

import argparse
import json
from pathlib import Path

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from speed import Stopwatch, report  # beside this file
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
    model: nn.Sequential, optimizer: torch.optim.Optimizer, rank: int, ranks: int, epochs: int
) -> tuple[torch.Tensor, float]:
    """Train on this rank's share of each global batch; return losses, and all ranks' samples/s."""
    images, labels = (part[TEST_IMAGES:] for part in load(model[0].weight.device))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    losses, watch = [], Stopwatch()
    for epoch in track(range(epochs), f"{ranks} rank(s)", disable=rank != 0):
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for mine in (batch[rank::ranks] for batch in shuffled.split(GLOBAL_BATCH)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            hvd.observe(samples=len(mine) if ranks == hvd.size() else 0)  # 0: rank 0 trains alone
        scheduler.step()
        losses[-1].item()  # This waits for the GPU, if there is one.
        watch.end(len(images))
    return torch.stack(losses).cpu(), watch.rate()


def accuracy(model: nn.Sequential) -> float:
    """Return the share of the test images that the model recognises."""
    images, labels = (part[:TEST_IMAGES] for part in load(model[0].weight.device))
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def save(folder: Path, curves: dict[str, list[float]]) -> None:
    """Write the loss curves as JSON and as a picture."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loss.json").write_text(json.dumps(curves))
    axes = Figure(layout="constrained").subplots()
    for (label, curve), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(curve, style, label=label)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="handwritten digits")
    axes.legend()
    axes.figure.savefig(folder / "loss.png", dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--compare", action="store_true", help="rank 0 also trains alone, first")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    hvd.init()
    best = "cuda" if torch.cuda.device_count() >= hvd.local_size() else "cpu"  # a GPU for each rank
    parser.add_argument("--device", default=best)
    arguments = parser.parse_args()
    curves, alone_rate = {}, float("nan")
    if arguments.compare and hvd.rank() == 0:
        alone = make_model().to(arguments.device)
        plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        losses, alone_rate = train(alone, plain, 0, 1, arguments.epochs)
        curves["1 rank, alone"] = losses.tolist()
    model = make_model().to(arguments.device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    losses, rate = train(model, optimizer, hvd.rank(), hvd.size(), arguments.epochs)
    curves[f"{hvd.size()} rank(s), hvdlite"] = hvd.allreduce(losses, name="losses").tolist()
    if hvd.rank() == 0:
        save(arguments.output, curves)
        print(f"test accuracy {accuracy(model):.1%}; loss curves in {arguments.output}/loss.png")
        print(report(rate, hvd.size(), hvd.local_size(), alone_rate))
