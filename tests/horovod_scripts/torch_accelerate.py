"""Hugging Face Accelerate, which accumulates, clips and schedules on each rank by itself."""

import tempfile

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, PASSES = 3, 12, 2

hvd.init()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
assert accelerator.num_processes == 1  # it trains alone, and does not cut batches
torch.manual_seed(13)
inputs = torch.randn(5 * BATCH, 6)
dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True)
loader = DataLoader(dataset, batch_size=BATCH // hvd.size(), sampler=sampler)

torch.manual_seed(100 + hvd.rank() if hvd.rank() else 13)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    norms = []
    for batch, target in loader:  # five batches: the last is a step of its own
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(batch), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print("loss", mean, *norms)

with tempfile.TemporaryDirectory() as folder:
    folder = hvd.broadcast_object(folder, root_rank=0)
    if hvd.rank() == 0:
        accelerator.save_state(folder)
    hvd.barrier()
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    accelerator.load_state(folder)
    assert all(map(torch.equal, before, model.parameters()))
    hvd.barrier()
