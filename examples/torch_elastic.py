"""Train on handwritten digits while ranks die, join and leave.

    hvdlite-run -np 4 --min-np 2 python examples/torch_elastic.py

Kill ranks while it runs (`kill -9 PID`; --verbose shows the numbers): no step is lost, every image
of an epoch is seen, and the ranks that hvdlite-run starts in their place take part. `make
demo-elastic` does this, and draws what happened. The batch of each rank stays the same, so the
global batch shrinks and grows with the number of ranks.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch_digits import TEST_IMAGES, accuracy, load, make_model  # beside this file

import hvdlite.torch as hvd

BATCH = 12  # of each rank
STEPS_PER_COMMIT = 10


def log(file: Path | None, **row: float) -> None:
    """Append a line about this rank's step to a file that all ranks share."""
    if file is not None:
        row |= {"time": time.time(), "pid": os.getpid()}
        with file.open("a") as rows:
            rows.write(json.dumps(row) + "\n")


@hvd.elastic.run
def train(
    state: hvd.elastic.TorchState, loader: torch.utils.data.DataLoader, options: argparse.Namespace
) -> None:
    """Train from where the state is; hvdlite calls this again when ranks have joined or left."""
    while state.epoch < options.epochs:
        for index, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(images), labels)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(index, BATCH)
            state.step += 1
            left = options.epochs - state.epoch
            log(options.log, step=state.step, loss=loss.item(), epochs_left=left)
            time.sleep(options.pause)
            if state.step % STEPS_PER_COMMIT == 0:
                state.commit()  # Ranks may join and leave here.
        state.commit()  # If a rank died in this epoch, the loop above now gets its other images.
        state.scheduler.step()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits, elastically")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0, help="seconds to sleep in each step")
    parser.add_argument("--log", type=Path, help="append a JSON line for each step of each rank")
    options = parser.parse_args()
    hvd.init()
    images, labels = (part[TEST_IMAGES:] for part in load(torch.device("cpu")))
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, BATCH, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(
        model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, step=0
    )
    train(state, loader, options)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy(model):.1%} after {state.step} steps on {hvd.size()} ranks")
