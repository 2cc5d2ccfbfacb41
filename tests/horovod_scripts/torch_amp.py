"""Mixed precision with a GradScaler, and clipping of the reduced gradients."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F

BATCH, STEPS, BAD_STEP = 12, 8, 3

hvd.init()
torch.manual_seed(40 + 10 * hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for step in range(STEPS):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    if step == BAD_STEP:
        targets[BATCH - 1] = 1e38  # one sample, on one rank: the gradients overflow
    inputs, targets = inputs[hvd.rank() :: hvd.size()], targets[hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    loss = F.mse_loss(outputs.float(), targets)
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    mean = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print("loss", mean.item(), scaler.get_scale())
