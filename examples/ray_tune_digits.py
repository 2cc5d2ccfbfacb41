"""Search the learning rate and the batch for handwritten digits, with several ranks a trial.

    python examples/ray_tune_digits.py --workers 2

Ray joins the cluster that RAY_ADDRESS names, or starts one on this machine. Ray Tune runs as many
trials at a time as the cluster has room for.
"""

import argparse
from pathlib import Path

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.ray

TEST_IMAGES = 357  # of 1,797


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images (64 pixels) and their digits, shuffled in the same way everywhere."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images[order], torch.tensor(digits.target)[order]


def train(rate: float, batch: int, epochs: int) -> float:
    """Train on all ranks, which share each batch; return the accuracy on the test images."""
    import hvdlite.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    images, labels = load()
    for _ in range(epochs):
        shuffled = TEST_IMAGES + torch.randperm(len(images) - TEST_IMAGES)
        for mine in (one[hvd.rank() :: hvd.size()] for one in shuffled.split(batch)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(images[:TEST_IMAGES]).argmax(1) == labels[:TEST_IMAGES]
    return right.float().mean().item()


def trial(config: dict) -> None:
    """Train with one choice, on the workers that Tune has reserved with this trial."""
    arguments = (config["rate"], config["batch"], config["epochs"])
    accuracies = hvdlite.ray.run(train, arguments, num_workers=config["workers"])
    tune.report({"accuracy": accuracies[0]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="search hyperparameters on a Ray cluster")
    parser.add_argument("--workers", type=int, default=2, help="ranks of each trial")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    # A trial that waits for workers while it holds what other trials need, and they wait as well,
    # would wait for ever. So each trial reserves all its workers at once: what comes first is the
    # trial's own process, which needs nothing. (Where workers are reserved later, as by a trainer
    # of Ray Train, set max_concurrent_trials in TuneConfig.)
    needs = tune.PlacementGroupFactory([{}] + [{"CPU": 1}] * arguments.workers)
    tuner = tune.Tuner(
        tune.with_resources(trial, needs),
        param_space={
            "rate": tune.grid_search([0.01, 0.1]),
            "batch": tune.grid_search([32, 128]),
            "epochs": arguments.epochs,
            "workers": arguments.workers,
        },
        tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=str(arguments.output.absolute()), verbose=0),
    )
    results = tuner.fit()
    for result in results:
        if result.error:
            raise SystemExit(f"a trial failed: {result.error}")
        chosen = f"rate {result.config['rate']}, batch {result.config['batch']}"
        print(f"{chosen}: {result.metrics['accuracy']:.1%}")
    best = results.get_best_result()
    print(f"best: rate {best.config['rate']}, batch {best.config['batch']}")
