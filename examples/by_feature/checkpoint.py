"""Save on rank 0, resume on all ranks: the resumed training has the same losses.

    hvdlite-run -np 2 python examples/by_feature/checkpoint.py

docs/checkpoints.md adds signals, safe writing and resuming in the middle of an epoch.
"""

import tempfile
from pathlib import Path

import torch
from digits import load_datasets, make_loader, make_model  # beside this file
from torch import nn

import hvdlite.torch as hvd


def train(first_epoch, last_epoch, load_from=None, save_to=None):
    loader, model = make_loader(load_datasets()[0]), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if load_from:
        checkpoint = torch.load(load_from)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for epoch in range(first_epoch, last_epoch):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if save_to and hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save_to)
    hvd.barrier()  # No rank reads before rank 0 has written.
    return losses


def main():
    hvd.init()
    with tempfile.TemporaryDirectory() as own:
        path = Path(hvd.broadcast_object(own, root_rank=0)) / "checkpoint.pt"
        train(0, 2, save_to=path)
        resumed = train(2, 4, load_from=path)
    whole = train(0, 4)
    if hvd.rank() == 0:
        print(f"last loss {resumed[-1]:.4f} when resumed, {whole[-1]:.4f} without a stop")
    assert resumed == whole[len(whole) // 2 :]


if __name__ == "__main__":
    main()
