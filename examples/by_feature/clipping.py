"""Gradient clipping: the norm is that of the averaged gradient, and the same on all ranks.

hvdlite-run -np 2 python examples/by_feature/clipping.py
"""

import torch
from digits import accuracy, load_datasets, make_loader, make_model  # beside this file
from torch import nn

import hvdlite.torch as hvd


def main():
    hvd.init()
    training, test = load_datasets()
    loader, model = make_loader(training), make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    norms = []
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
    norms = torch.stack(norms)
    assert torch.equal(hvd.allreduce(norms, op=hvd.Max), norms)  # the same on every rank
    result = accuracy(model, test)
    if hvd.rank() == 0:
        clipped = (norms > 0.5).float().mean().item()
        print(f"test accuracy {result:.1%}; {clipped:.0%} of the steps were clipped")
    assert result > 0.9


if __name__ == "__main__":
    main()
