"""Train the network of torch_digits.py with DistributedDataParallel over the backend "hvdlite".

    hvdlite-run -np 2 python examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py

This is a script as it is written for gloo, with one other word: it imports nothing of hvdlite. The
losses are those of torch_digits.py.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_digits import GLOBAL_BATCH, TEST_IMAGES, accuracy, load, make_model  # beside this file


def train(model: nn.Module, epochs: int) -> torch.Tensor:
    """Train on this rank's share of each global batch; return the mean losses of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = (part[TEST_IMAGES:] for part in load(torch.device("cpu")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    losses = []
    for epoch in range(epochs):
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for mine in (batch[rank::ranks] for batch in shuffled.split(GLOBAL_BATCH)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
    mean = torch.stack(losses)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    dist.init_process_group("hvdlite")
    model = make_model()
    losses = train(DistributedDataParallel(model), arguments.epochs)
    if dist.get_rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "ddp.json").write_text(json.dumps(losses.tolist()))
        print(f"test accuracy {accuracy(model):.1%} on {dist.get_world_size()} rank(s)")
    dist.destroy_process_group()
