"""Virtual ranks: training ends in the same bits on one rank and on two.

hvdlite-run -np 2 python examples/by_feature/virtual_ranks.py
"""

import hashlib
import os
import subprocess
import sys

import torch
from digits import load_datasets  # beside this file
from torch import nn
from torch.utils.data import DataLoader

import hvdlite.torch as hvd


def train():
    training, _ = load_datasets()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )
    sampler = hvd.VirtualBatchSampler(training, batch_size=16, virtual_size=8, seed=0)
    loader = DataLoader(training, batch_sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), virtual_size=8)
    for epoch in range(3):
        for step in optimizer.virtual_steps(loader, epoch, model):
            optimizer.zero_grad()
            for images, labels in step:  # The batches of this rank's virtual ranks, in turn.
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                step.record(loss)
            optimizer.step()
    digest = hashlib.sha256(repr(step.loss).encode())
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return f"loss {step.loss:.4f}, SHA-256 {digest.hexdigest()[:16]}"


def train_alone():
    """Train in a process that is not a rank of this job."""
    names = ("PATH", "PYTHONPATH", "HOME")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    command = [sys.executable, __file__, "alone"]
    return subprocess.check_output(command, env=environment, text=True).strip()


def main(alone=False):
    hvd.init()
    result = train()
    if alone:
        print(result)
    elif hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {result}")
        assert train_alone() == result


if __name__ == "__main__":
    main(*sys.argv[1:])
