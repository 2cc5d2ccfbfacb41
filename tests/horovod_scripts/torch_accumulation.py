"""Gradient accumulation: three backward passes on each rank before gradients are sent."""

import horovod.torch as hvd
import torch

PASSES, BATCH, STEPS = 3, 12, 5

hvd.init()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.02),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PASSES,
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
criterion = torch.nn.CrossEntropyLoss()

for step in range(STEPS):
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in range(PASSES):
        generator = torch.Generator().manual_seed(PASSES * step + part)
        inputs = torch.randn(BATCH, 6, generator=generator)
        labels = inputs[:, :3].argmax(1)
        mine = slice(hvd.rank(), None, hvd.size())
        loss = criterion(model(inputs[mine]), labels[mine]) / PASSES
        loss.backward()
        total += loss.detach()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
    hvd.allreduce_(total, name="loss")
    if hvd.rank() == 0:
        print("loss", total.item(), norm.item())
