"""Gradient accumulation, in two ways that give the same parameters, bit for bit.

hvdlite-run -np 2 python examples/by_feature/accumulation.py
"""

from contextlib import nullcontext

import torch
from digits import accuracy, load_datasets, make_loader, make_model  # beside this file
from torch import nn

import hvdlite.torch as hvd

BATCHES_PER_STEP = 3


def train(declared):
    training, test = load_datasets()
    loader, model = make_loader(training, batch_size=16), make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        model.named_parameters(),
        backward_passes_per_step=BATCHES_PER_STEP if declared else 1,
    )
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for index, (images, labels) in enumerate(loader):
            last = index % BATCHES_PER_STEP == BATCHES_PER_STEP - 1
            with nullcontext() if last or declared else optimizer.no_sync():
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss / BATCHES_PER_STEP).backward()  # Gradients are summed, so divide.
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model, accuracy(model, test)


def main():
    hvd.init()
    by_number, result = train(declared=True)
    by_context, _ = train(declared=False)
    if hvd.rank() == 0:
        print(f"test accuracy {result:.1%}")
    assert result > 0.9
    for one, other in zip(by_number.parameters(), by_context.parameters(), strict=True):
        assert torch.equal(one, other)


if __name__ == "__main__":
    main()
