"""Lightning's manual optimization: two optimizers, which the script steps by itself."""

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 12


def score(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


class Pair(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker = torch.nn.Linear(2, 2)
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def configure_optimizers(self):
        return [
            hvd.DistributedOptimizer(
                torch.optim.Adam(part.parameters(), lr=0.05),
                named_parameters=part.named_parameters(),
            )
            for part in (self.maker, self.critic)
        ]

    def training_step(self, batch, index):
        real, noise = batch
        optimizer_m, optimizer_c = self.optimizers()

        self.toggle_optimizer(optimizer_c)
        made = self.maker(noise).detach()
        loss_c = score(self.critic(real), 1.0) + score(self.critic(made), 0.0)
        optimizer_c.zero_grad()
        self.manual_backward(loss_c)
        self.clip_gradients(optimizer_c, 0.1, "norm")
        optimizer_c.step()
        self.untoggle_optimizer(optimizer_c)

        self.toggle_optimizer(optimizer_m)
        loss_m = score(self.critic(self.maker(noise)), 1.0)
        optimizer_m.zero_grad()
        self.manual_backward(loss_m)
        optimizer_m.step()
        self.untoggle_optimizer(optimizer_m)

        losses = hvd.allreduce(torch.stack([loss_c.detach(), loss_m.detach()]), name="losses")
        if hvd.rank() == 0:
            print("loss", *losses.tolist())


def main():
    hvd.init()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(4 * BATCH, 2) + 1, torch.randn(4 * BATCH, 2))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    model = Pair()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=BATCH // hvd.size(), sampler=sampler))


if __name__ == "__main__":
    main()
