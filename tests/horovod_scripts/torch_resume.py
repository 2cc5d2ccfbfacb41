"""A run that stops after some epochs, and another that goes on from rank 0's checkpoint."""

import os
import tempfile

import horovod.torch as hvd
import torch
import torch.nn.functional as F

EPOCHS, BATCH = 4, 12


def path_of(folder, epoch):
    return os.path.join(folder, f"checkpoint-{epoch}.pt")


def train(folder, until, seed):
    hvd.init()
    torch.manual_seed(seed + hvd.rank())  # what is not broadcast differs
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    resume_from = 0
    for epoch in range(EPOCHS, 0, -1):
        if os.path.exists(path_of(folder, epoch)):
            resume_from = epoch
            break
    # The others may not see rank 0's disk.
    resume_from = hvd.broadcast(torch.tensor(resume_from), root_rank=0, name="resume_from").item()

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = None
    if resume_from > 0 and hvd.rank() == 0:
        state = torch.load(path_of(folder, resume_from))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    elif hvd.rank() == 0:
        torch.manual_seed(11)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = hvd.broadcast_object(state and state["scheduler"], root_rank=0)
    if schedule:
        scheduler.load_state_dict(schedule)

    for epoch in range(resume_from, until):
        generator = torch.Generator().manual_seed(epoch)
        inputs = torch.randn(BATCH, 5, generator=generator)[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), inputs.prod(1, keepdim=True))
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print("loss", mean.item(), scheduler.get_last_lr()[0])
            everything = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(everything, path_of(folder, epoch + 1))
    hvd.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder, until=2, seed=100)
        train(folder, until=EPOCHS, seed=200)
