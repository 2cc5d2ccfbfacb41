"""Mixed precision: autocast to bfloat16, or float16 with a GradScaler.

hvdlite-run -np 2 python examples/by_feature/amp.py
"""

import torch
from digits import accuracy, load_datasets, make_loader, make_model  # beside this file
from torch import nn

import hvdlite.torch as hvd


def train(dtype):
    training, test = load_datasets()
    loader, model = make_loader(training), make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    # Scaling is for float16 only: small gradients would become zero there.
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):  # "cuda" on a GPU
                loss = nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()  # An overflow on one rank is one on all ranks.
            scaler.step(optimizer)
            scaler.update()
    hvd.check_replicas(model.named_parameters())
    return accuracy(model, test)


def main():
    hvd.init()
    for dtype in (torch.bfloat16, torch.float16):
        result = train(dtype)
        if hvd.rank() == 0:
            print(f"test accuracy {result:.1%} with {dtype}")
        assert result > 0.9


if __name__ == "__main__":
    main()
