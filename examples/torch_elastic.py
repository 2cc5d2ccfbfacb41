"""Train on handwritten digits while ranks die, join and leave.

    hvdlite-run -np 4 --min-np 2 python examples/torch_elastic.py

Kill ranks while it runs (`kill -9 PID`; --verbose shows the numbers): no step is lost, and the
ranks that hvdlite-run starts in their place take part. A step has the batches of eight virtual
ranks, which any number of ranks up to eight carries, so that training ends in the same bits as on
one rank: `make demo-elastic` kills ranks, compares all steps, and draws what happened.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch_digits import TEST_IMAGES, accuracy, load, make_model  # beside this file

import hvdlite.torch as hvd

VIRTUAL_SIZE, BATCH = 8, 6  # BATCH is that of each virtual rank.
STEPS_PER_COMMIT = 10


def sha256(model: nn.Module) -> str:
    """Return the hash of the parameters."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def log(file: Path | None, **row: float | str) -> None:
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
        for step in state.optimizer.virtual_steps(loader, state.epoch, state.model):
            state.optimizer.zero_grad()
            for images, labels in step:  # The batches of this rank's virtual ranks, in turn.
                loss = nn.functional.cross_entropy(state.model(images), labels)
                loss.backward()
                step.record(loss)
            state.optimizer.step()
            state.step += 1
            left = options.epochs - state.epoch
            digest = sha256(state.model)
            log(options.log, step=state.step, loss=step.loss, sha256=digest, epochs_left=left)
            time.sleep(options.pause)
            if state.step % STEPS_PER_COMMIT == 0:
                state.commit()  # Ranks may join and leave here.
        state.scheduler.step()
        state.epoch += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits, elastically")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0, help="seconds to sleep in each step")
    parser.add_argument("--log", type=Path, help="append a JSON line for each step of each rank")
    options = parser.parse_args()
    hvd.init()
    images, labels = (part[TEST_IMAGES:] for part in load(torch.device("cpu")))
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = hvd.VirtualBatchSampler(dataset, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    names = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, names, virtual_size=VIRTUAL_SIZE)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, epoch=0, step=0)
    train(state, loader, options)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy(model):.1%} after {state.step} steps on {hvd.size()} ranks")
