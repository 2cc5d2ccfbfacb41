"""torch.compile: compile the model, and wrap the optimizer as without it.

    hvdlite-run -np 2 python examples/by_feature/compiled.py

The argument is a backend of torch.compile; without it, inductor, which needs a C++ compiler.
"""

import sys

import torch
from digits import accuracy, load_datasets, make_loader, make_model  # beside this file
from torch import nn

import hvdlite.torch as hvd


def main(backend="inductor"):
    hvd.init()
    training, test = load_datasets()
    loader, model = make_loader(training), make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    compiled = torch.compile(model, backend=backend)  # It shares the parameters of the model.
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(compiled(images), labels).backward()
            optimizer.step()
    hvd.check_replicas(model.named_parameters())
    result = accuracy(model, test)
    if hvd.rank() == 0:
        print(f"test accuracy {result:.1%}")
    assert result > 0.9


if __name__ == "__main__":
    main(*sys.argv[1:])
