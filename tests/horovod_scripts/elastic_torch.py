"""Elastic training with PyTorch in which a rank dies, and another one joins."""

import os
import signal
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F

EPOCHS, BATCH, RANKS, LEARNING_RATE = 4, 4, 3, 0.02

hvd.init()
torch.manual_seed(3 + hvd.rank())
inputs = torch.randn(120, 5, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
train_sampler = hvd.elastic.ElasticSampler(dataset)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=train_sampler)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
worlds = []


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * hvd.size()


@hvd.elastic.run
def train(state):
    worlds.append(hvd.size())
    while state.epoch < EPOCHS or worlds[-1] < RANKS:
        for state.batch, (data, target) in enumerate(train_loader):
            if state.epoch == 1 and state.batch == 3 and os.environ["HVDLITE_WORKER"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = F.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
            train_sampler.record_batch(state.batch, BATCH)
            time.sleep(0.02)
            if state.batch % 5 == 4:
                state.commit()
        state.commit()
        state.losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        state.epoch += 1
        train_sampler.set_epoch(state.epoch)


state = hvd.elastic.TorchState(
    model, optimizer, train_sampler=train_sampler, epoch=0, batch=0, losses=[]
)
state.register_reset_callbacks([on_state_reset])
train(state)
weights = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
if hvd.rank() == 0:
    assert state.losses[-1] < 0.1 * state.losses[0], state.losses
    assert all(one == weights[0] for one in weights), weights
    print(f"trained on {hvd.size()} ranks, rate {optimizer.param_groups[0]['lr']:.2f}")
