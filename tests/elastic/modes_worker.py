"""A worker that trains a model in each mode, while others die: `python modes_worker.py`.

Worker 2 dies between the backward and the end of a step, and worker 1 in the middle of a round of
local SGD. Workers that join bring the world back to three ranks. After each step the models of
the synchronous modes are the same on all ranks, to the bit, and after each average those of local
SGD. Each worker writes a line at its end.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.elastic import epochs
from hvdlite.torch.optimizers.buckets import Buckets
from hvdlite.torch.optimizers.rounds import _Mean as Mean

EVERY = 5
COMMIT = 10
DEATHS = {2: ("reduction", 13), 1: ("round", 16)}  # by worker: where, and from which step on
STEPS = 80  # at least, and so many more as it takes until three ranks have met again
WORKER = int(os.environ["HVDLITE_WORKER"])
SYNCHRONOUS = ("compressed", "measured")

torch.set_num_threads(1)
warnings.simplefilter("error")


def die_at(point: str, step: int) -> None:
    """End this worker if this is where it dies."""
    where, first = DEATHS.get(WORKER, ("", 0))
    if where == point and step >= first:
        os.kill(os.getpid(), signal.SIGKILL)


class Now:
    """The step under way."""

    step = 0


wait, receive = Buckets.wait, Mean.wait


def waiting(buckets: Buckets, *arguments: Any) -> Any:
    """Wait for the gradients of a step, or die after they were sent."""
    die_at("reduction", Now.step)
    return wait(buckets, *arguments)


def receiving(mean: Mean) -> Any:
    """Wait for the mean of a round, or die after the changes were sent."""
    die_at("round", Now.step)
    return receive(mean)


Buckets.wait, Mean.wait = waiting, receiving  # type: ignore[method-assign]


def make_model() -> torch.nn.Sequential:
    """Make a small model, the same on all ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 12)]
    return torch.nn.Sequential(*layers)


def loss_of(model: torch.nn.Module, samples: int = 16, seed: int | None = None) -> torch.Tensor:
    """Return the loss of random samples, other ones on each worker and in each step."""
    seed = 1000 * Now.step + WORKER if seed is None else seed
    x = torch.randn(samples, 12, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = (model(x) - x.flip(1).sin()).square().mean()
    return loss


@torch.no_grad()
def learned(model: torch.nn.Module) -> float:
    """Return the loss of a model in proportion to the untrained one's, both of the same samples.

    The step in which a job ends depends on when workers join, so the samples are fixed.
    """
    return round(float(loss_of(model, 4096, 7) / loss_of(make_model(), 4096, 7)), 3)


hvd.init()
models = {name: make_model() for name in (*SYNCHRONOUS, "local")}
plain = {
    name: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    for name, model in models.items()
}
optimizers: dict[str, Any] = {
    "compressed": hvd.DistributedOptimizer(plain["compressed"], compression=hvd.Compression.bf16),
    "measured": hvd.DistributedOptimizer(plain["measured"]),
    "local": hvd.LocalSGD(plain["local"], every=EVERY, outer_momentum=0.3),
}


def step_all() -> None:
    """Make a step of each mode."""
    for name, optimizer in optimizers.items():
        optimizer.zero_grad()
        loss_of(models[name]).backward()
        optimizer.step()
    for name in SYNCHRONOUS:
        hvd.check_replicas(models[name].named_parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    """Train until three ranks have met again, and check what each mode promises."""
    first = Now.step = state.step
    while Now.step < STEPS or hvd.size() < 3 or Now.step < first + 2 * COMMIT:
        step_all()
        Now.step += 1
        state.step = Now.step
        if Now.step % COMMIT == 0:
            optimizers["local"].average()
            hvd.check_replicas(models["local"].named_parameters())
            state.commit()
        time.sleep(0.01)  # A worker that joins needs the processor, too.


attributes = {f"{name}_model": model for name, model in models.items()}
attributes |= {f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}
train(hvd.elastic.TorchState(**attributes, step=0))
losses = {name: learned(model) for name, model in models.items()}
assert max(losses.values()) < 0.2, losses
workers = [len(epoch.workers) for epoch in epochs.history()]
print(f"worlds {workers}, losses {losses}", flush=True)
