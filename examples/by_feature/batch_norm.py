"""BatchNorm: average its moving statistics, or normalize by the batches of all ranks.

hvdlite-run -np 2 python examples/by_feature/batch_norm.py
"""

import torch
from digits import accuracy, load_datasets, make_loader  # beside this file
from torch import nn

import hvdlite.torch as hvd


def train(synchronized):
    training, test = load_datasets()
    loader = make_loader(training)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    if synchronized:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if not synchronized:
        hvd.allreduce_buffers(model)  # before evaluation, and before a checkpoint
    hvd.check_replicas(model.state_dict().items())  # parameters and moving statistics
    return accuracy(model.eval(), test)


def main():
    hvd.init()
    for synchronized in (False, True):
        result = train(synchronized)
        if hvd.rank() == 0:
            print(f"test accuracy {result:.1%}, {synchronized=}")
        assert result > 0.9


if __name__ == "__main__":
    main()
