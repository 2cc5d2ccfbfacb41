"""Two models that train against each other, each with an optimizer of its own."""

import horovod.torch as hvd
import torch
from torch import nn

BATCH, NOISE = 12, 3

hvd.init()
torch.manual_seed(hvd.rank())
generator = nn.Sequential(nn.Linear(NOISE, 8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
if hvd.rank() == 0:
    torch.manual_seed(5)
    for parameter in [*generator.parameters(), *critic.parameters()]:
        nn.init.normal_(parameter, std=0.4)
for model in (generator, critic):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

generator_optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999)),
    named_parameters=generator.named_parameters(prefix="generator"),
)
# Twice backward per step: on real samples, and on made ones.
critic_optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999)),
    named_parameters=critic.named_parameters(prefix="critic"),
    backward_passes_per_step=2,
)
loss_of = nn.BCEWithLogitsLoss()

for step in range(5):
    seeded = torch.Generator().manual_seed(step)
    real = torch.randn(BATCH, 2, generator=seeded)[hvd.rank() :: hvd.size()] * 0.5 + 2
    noise = torch.randn(BATCH, NOISE, generator=seeded)[hvd.rank() :: hvd.size()]
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

    critic_optimizer.zero_grad()
    made = generator(noise)
    on_real = loss_of(critic(real), ones)
    on_real.backward()
    on_made = loss_of(critic(made.detach()), zeros)
    on_made.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    fooled = loss_of(critic(made), ones)
    fooled.backward()
    generator_optimizer.step()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)

    losses = hvd.allreduce(torch.stack([on_real, on_made, fooled]).detach(), name="losses")
    if hvd.rank() == 0:
        print("loss", *losses.tolist())
