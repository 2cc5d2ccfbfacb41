"""Logging: all ranks reduce a figure, and rank 0 writes it (here to TensorBoard's format).

hvdlite-run -np 2 python examples/by_feature/logging_on_rank_0.py
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from digits import load_datasets, make_loader, make_model  # beside this file
from tensorboardX import SummaryWriter
from torch import nn

import hvdlite.torch as hvd


def main():
    hvd.init()
    loader, model = make_loader(load_datasets()[0]), make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    first = hvd.rank() == 0
    folder, logged = Path(tempfile.mkdtemp()), []  # a folder of your own, such as "runs"
    with SummaryWriter(str(folder)) if first else nullcontext() as writer:
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            losses = []
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            # Every rank takes part in the reduction, so it stands outside of `if first`.
            average = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
            logged.append(average)
            if first:
                writer.add_scalar("loss", average, epoch)
                print(f"epoch {epoch}: loss {average:.4f}, logged in {folder}")
    assert logged == sorted(logged, reverse=True)
    assert len(list(folder.iterdir())) == first


if __name__ == "__main__":
    main()
