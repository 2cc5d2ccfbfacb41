"""Train a linear model by a trainer that knows torch's variables: `train.py TRAINER PROCESSES`.

Every process prints how many there are, and the parameters; the batches of all processes together
are the same for any number of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

SAMPLES, BATCH = 64, 8
PROCESSES = int(sys.argv[2])


def data() -> torch.utils.data.TensorDataset:
    """Return the whole data set, equal in all processes."""
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def model() -> torch.nn.Linear:
    """Return the same model in all processes."""
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)


def batches(**options: Any) -> torch.utils.data.DataLoader[Any]:
    """Return this process's part of each batch, unless a trainer divides the samples."""
    return torch.utils.data.DataLoader(data(), BATCH // PROCESSES, **options)


def plain() -> tuple[int, torch.nn.Module]:
    """Train by torch.distributed alone, as a script for torchrun does."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    if PROCESSES == 1:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    else:
        assert os.environ["LOCAL_RANK"] == os.environ["RANK"]
        distributed.init_process_group("gloo")
    wrapped = DistributedDataParallel(model())
    sampler = torch.utils.data.DistributedSampler(data(), shuffle=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for inputs, wanted in batches(sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(inputs), wanted).backward()
        optimizer.step()
    return distributed.get_world_size(), wrapped.module


def accelerate() -> tuple[int, torch.nn.Module]:
    """Train by Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD((trained := model()).parameters(), lr=0.1)
    wrapped, optimizer, loader = accelerator.prepare(trained, optimizer, batches())
    for inputs, wanted in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(wrapped(inputs), wanted))
        optimizer.step()
    return accelerator.num_processes, trained


def transformers() -> tuple[int, torch.nn.Module]:
    """Train by the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.linear(inputs), labels)}

    arguments = TrainingArguments(
        "trainer",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH // PROCESSES,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        disable_tqdm=True,
    )
    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in data()]
    Trainer(trained := Model(), arguments, train_dataset=rows).train()
    return arguments.world_size, trained.linear


def lightning() -> tuple[int, torch.nn.Module]:
    """Train by Lightning."""
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.linear(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy="ddp" if PROCESSES > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # It would shuffle.
    )
    rank = int(os.environ.get("RANK", "0"))
    sampler = torch.utils.data.DistributedSampler(data(), PROCESSES, rank, shuffle=False)
    trainer.fit(trained := Module(), batches(sampler=sampler))
    return trainer.world_size, trained.linear


def ignite() -> tuple[int, torch.nn.Module]:
    """Train by ignite."""
    import ignite.distributed as idist
    from ignite.engine import create_supervised_trainer

    found: list[tuple[int, torch.nn.Module]] = []

    def train(local_rank: int) -> None:
        wrapped = idist.auto_model(trained := model())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        loader = idist.auto_dataloader(data(), batch_size=BATCH, shuffle=False)
        create_supervised_trainer(wrapped, optimizer, torch.nn.functional.mse_loss).run(loader)
        found.append((idist.get_world_size(), trained))

    with idist.Parallel(backend="gloo" if PROCESSES > 1 else None) as parallel:
        parallel.run(train)
    return found[0]


if __name__ == "__main__":
    size, trained = globals()[sys.argv[1]]()
    numbers = [value for tensor in trained.parameters() for value in tensor.flatten().tolist()]
    # One piece, since torchrun's processes share stdout, and write each piece at once.
    sys.stdout.write(" ".join(map(str, ["trained", size, *numbers])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # At Python's ordinary end, a thread of gloo now and then aborts the process.
