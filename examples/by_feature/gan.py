"""A GAN: two models, two optimizers, and a loss that flows through both.

hvdlite-run -np 2 python examples/by_feature/gan.py
"""

import torch
from torch import nn

import hvdlite.torch as hvd

judge = nn.functional.binary_cross_entropy_with_logits


def distributed(model):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))
    return hvd.DistributedOptimizer(optimizer, model.named_parameters())


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())  # Each rank draws samples of its own.
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    discriminator = nn.Sequential(nn.Linear(1, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer_g, optimizer_d = distributed(generator), distributed(discriminator)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(400):
        real, fake = torch.randn(64, 1) + 3, generator(torch.randn(64, 4))
        optimizer_d.zero_grad()
        judge(discriminator(real), ones).backward()  # Two backwards for one step are fine.
        judge(discriminator(fake.detach()), zeros).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        judge(discriminator(fake), ones).backward()  # optimizer_d.zero_grad() drops its part.
        optimizer_g.step()
    hvd.check_replicas([*generator.named_parameters()])
    hvd.check_replicas([*discriminator.named_parameters()])
    mean = hvd.allreduce(generator(torch.randn(1000, 4)).detach().mean()).item()
    if hvd.rank() == 0:
        print(f"the samples have the mean 3, those of the generator {mean:.2f}")
    assert 2 < mean < 4


if __name__ == "__main__":
    main()
