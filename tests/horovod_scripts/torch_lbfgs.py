"""LBFGS, whose closure is evaluated as often as the line search likes: alike on all ranks."""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(24, 4, generator=generator, dtype=torch.float64)
targets = torch.sin(inputs).sum(1, keepdim=True)
inputs, targets = inputs[hvd.rank() :: hvd.size()], targets[hvd.rank() :: hvd.size()]


def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for _ in range(4):
    loss = optimizer.step(closure)
    if hvd.rank() == 0:
        print("loss", loss.item())
