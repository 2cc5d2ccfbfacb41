"""Models, data and training loops for the tests of virtual ranks, and hashes of what they make."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hvdlite.torch as hvd
from references import virtual_ranks

VIRTUAL_SIZE = 8
SEED = 3
STEPS = 3  # of an epoch
BATCH = 4


class Mlp(nn.Module):
    """Digits-like images, with dropout, and with a layer that only some virtual ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 24), nn.Linear(24, 10)
        self.sometimes, self.never = nn.Linear(24, 24), nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(functional.relu(self.first(inputs.flatten(1))), 0.3)
        if torch.rand(()) < 0.3:
            hidden = self.sometimes(hidden)
        return self.second(hidden * (1 + 0.1 * random.random()) + 0.1 * np.random.rand())


class Conv(nn.Module):
    """A convolutional net with batch normalization, and buffers that modules write themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        self.last = nn.Linear(64, 10)
        self.register_buffer("constant", torch.full((3,), float("nan")))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += random.randrange(100)
        self.replaced = 0.9 * self.replaced + torch.rand(2)
        return self.last(self.layers(inputs).flatten(1))


class Transformer(nn.Module):
    """One layer with attention and dropout over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.last = nn.Linear(16, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.embed(inputs.squeeze(1))).mean(1))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.003)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.003)


MODELS = (Mlp, Conv, Transformer)
OPTIMIZERS = (sgd, adamw, adam)
KINDS = [f"{model.__name__} {make.__name__}" for model in MODELS for make in OPTIMIZERS]


class Images(torch.utils.data.Dataset):
    """Images, random ones if none are given, to which a transform adds noise of each library."""

    def __init__(self, images: Any = None, labels: Any = None) -> None:
        generator = torch.Generator().manual_seed(0)
        count = VIRTUAL_SIZE * BATCH * STEPS + 5
        if images is None:
            images = torch.randn(count, 1, 8, 8, generator=generator)
            labels = torch.randint(0, 10, (count,), generator=generator)
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(8, 8) + random.random() + np.random.rand()
        return self.images[index] + 0.1 * noise.float(), self.labels[index]


class Training:
    """One model and its optimizer, from the same start on all ranks."""

    def __init__(
        self, kind: str, workers: int = 0, plain: bool = False, data: Images | None = None
    ) -> None:
        model, make = kind.split()
        torch.manual_seed(SEED)
        self.model = {one.__name__: one for one in MODELS}[model]()
        optimizer = {one.__name__: one for one in OPTIMIZERS}[make](self.model.parameters())
        self.clips = make == "adam"
        if not plain:
            names = self.model.named_parameters()
            optimizer = hvd.DistributedOptimizer(optimizer, names, virtual_size=VIRTUAL_SIZE)
        self.optimizer: Any = optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.data = data or Images()
        self.sampler = hvd.VirtualBatchSampler(
            self.data, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=SEED
        )
        self.loader = torch.utils.data.DataLoader(
            self.data, batch_sampler=self.sampler, num_workers=workers
        )
        self.losses: list[float] = []

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.model(inputs), targets)

    def update(self) -> None:
        """Step as scripts do, with the gradients that are there."""
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()

    def run(self, epochs: int = 2) -> Iterator[None]:
        """Train, and yield after each step."""
        for epoch in range(epochs):
            for step in self.optimizer.virtual_steps(self.loader, epoch, self.model):
                self.optimizer.zero_grad()
                for batch in step:
                    loss = self.loss_of(batch)
                    loss.backward()
                    step.record(loss)
                self.update()
                self.losses.append(step.loss)
                yield

    def hash(self) -> str:
        """Return the SHA-256 of parameters, buffers, the optimizer's state and the losses."""
        digest = hashlib.sha256(repr(self.losses).encode())
        states = self.optimizer.state_dict()["state"]
        values = [*self.model.parameters(), *self.model.buffers()]
        values += [one for state in states.values() for one in state.values() if one is not None]
        for value in values:
            digest.update(torch.as_tensor(value).detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def alone(kind: str, steps: int, data: Images) -> str:
    """Train in this process with plain torch, and return the hash."""
    training = Training(kind, plain=True, data=data)
    collate = torch.utils.data.default_collate
    for done in range(steps):
        epoch, number = divmod(done, training.sampler.steps)
        batches = []
        for virtual_rank in range(VIRTUAL_SIZE):
            virtual_ranks.seed_all(SEED, epoch, number, virtual_rank, "data")
            indices = training.sampler.batch(epoch, number, virtual_rank)
            batches.append(collate([training.data[index] for index in indices]))
        loss = virtual_ranks.step(training.model, training.loss_of, batches, SEED, epoch, number)
        training.losses.append(loss)
        training.update()
    return training.hash()
