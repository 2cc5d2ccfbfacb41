"""Lightning's Trainer on each rank, by itself: it clips, accumulates and saves."""

import os
import tempfile

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH, PASSES = 12, 2


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)
        )
        self.losses = []

    def training_step(self, batch, index):
        inputs, target = batch
        loss = F.mse_loss(self.layers(inputs), target)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        inputs, target = batch
        loss = hvd.allreduce(F.mse_loss(self.layers(inputs), target), name="validation")
        self.log("val_loss", loss)  # what the checkpoints are chosen by

    def on_train_epoch_end(self):
        losses = hvd.allreduce(torch.stack(self.losses), name="losses")
        self.losses.clear()
        found = self.trainer.callback_metrics["val_loss"].item()
        if hvd.rank() == 0:
            print("loss", found, *losses.tolist())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.named_parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]


def loader_of(seed, batches):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batches * BATCH, 5, generator=generator)
    dataset = TensorDataset(inputs, inputs.prod(1, keepdim=True))
    sampler = DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=seed == 0
    )
    return DataLoader(dataset, batch_size=BATCH // hvd.size(), sampler=sampler)


def fit(folder, epochs, ckpt_path=None):
    first = hvd.rank() == 0
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # not that of a Slurm job around it
        max_epochs=epochs,
        accumulate_grad_batches=PASSES,
        gradient_clip_val=0.3,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=first,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, "newest")] if first else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert trainer.world_size == 1  # it knows of no other rank
    torch.manual_seed(31)
    model = Regression()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trainer.fit(model, loader_of(0, 5), loader_of(1, 2), ckpt_path=ckpt_path)


def main():
    hvd.init()
    with tempfile.TemporaryDirectory() as own:
        folder = hvd.broadcast_object(own, root_rank=0)
        fit(folder, 2)
        assert os.listdir(own) == (["newest.ckpt"] if hvd.rank() == 0 else [])
        hvd.barrier()
        fit(folder, 4, ckpt_path=os.path.join(folder, "newest.ckpt"))  # goes on
        hvd.barrier()


if __name__ == "__main__":
    main()
