"""Train on handwritten digits asynchronously: workers push gradients to parameter servers.

    hvdlite-run -np 6 --servers 2 python examples/parameter_server.py --straggler 20

The first two processes serve, and the other four train, each at its own pace. With --straggler one
worker is that many milliseconds slower in each step; with --staleness no worker is more than so
many steps ahead of it. Kill a worker while it runs (`kill -9 PID`; --verbose shows the numbers):
the others go on, and hvdlite-run starts it again. With --save the servers write checkpoints, from
which the next job goes on.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd

BATCH = 16  # of each worker
TEST_IMAGES = 357  # of 1,797


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images and their digits, shuffled in the same way everywhere."""
    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(digits)[order]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(group: hvd.parameter_server.Group, steps: int, staleness: int | None, lag: float) -> None:
    """Train one worker on batches that it draws itself, and let worker 0 print the result."""
    images, labels = (part[TEST_IMAGES:] for part in load())
    model = make_model()
    replica = group.replica(model.named_parameters(), staleness=staleness)
    draws = torch.Generator().manual_seed(group.index)
    begin = time.perf_counter()
    for _ in range(steps):
        time.sleep(lag)
        mine = torch.randint(len(images), (BATCH,), generator=draws)
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        replica.step()  # push the gradients, pull the parameters
    seconds = time.perf_counter() - begin
    print(f"{1000 * seconds / steps:.1f} ms a step")
    if group.index == 0:
        replica.pull()
        images, labels = (part[:TEST_IMAGES] for part in load())
        right = (model(images).argmax(1) == labels).float().mean()
        print(group.report())
        print(f"test accuracy {right:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits asynchronously")
    parser.add_argument("--steps", type=int, default=400, help="of each worker")
    parser.add_argument("--staleness", type=int)
    parser.add_argument("--straggler", type=float, default=0.0, metavar="MS")
    parser.add_argument("--save", help="path of the servers' checkpoints")
    arguments = parser.parse_args()
    with hvd.parameter_server.connect() as group:
        if group.serves:
            # Every worker's push is one step, so each gets its share of the rate.
            rate = 0.1 / group.workers
            group.serve(
                lambda params: torch.optim.SGD(params, lr=rate, momentum=0.9), save=arguments.save
            )
        else:
            lag = arguments.straggler / 1000 if group.index == group.workers - 1 else 0.0
            train(group, arguments.steps, arguments.staleness, lag)
