"""A worker that trains with sharded state, while others die: `python sharded_worker.py`.

The same model is trained with a `DistributedOptimizer`, and has the same bits after each step.
Worker 2 dies in the middle of a step, when the others have updated their parameters, and worker 1
between two steps. Workers that join bring the world back to three ranks, which then go back to
their last commit once.
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
from hvdlite.torch.sharded.shares import GatheredParameters

DEATHS = {2: ("exchange", 7), 1: ("step", 13)}  # by worker: where, and in which step
STEPS, COMMIT = 30, 10
WORKER = int(os.environ["HVDLITE_WORKER"])

torch.set_num_threads(1)
warnings.simplefilter("error")


class Now:
    """The step under way."""

    step = 0
    failed = False  # whether all ranks have gone back to a commit


def die_at(point: str) -> None:
    """End this worker if this is where it dies."""
    if DEATHS.get(WORKER) == (point, Now.step):
        time.sleep(0.1)  # The others wait in the exchange already.
        os.kill(os.getpid(), signal.SIGKILL)


run = GatheredParameters.run


def running(exchange: GatheredParameters) -> bool:
    """Exchange parameters, or die."""
    die_at("exchange")
    return run(exchange)


GatheredParameters.run = running  # type: ignore[method-assign]


def make_model() -> torch.nn.Sequential:
    """Make a small model, the same on all ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 12)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(12, 12), torch.nn.Linear(12, 12))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer that has much state."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


hvd.init()
models = [make_model(), make_model()]
sharded = hvd.ShardedOptimizer(adamw(models[0]), models[0].named_parameters(), copies=2)
plain = hvd.DistributedOptimizer(adamw(models[1]), models[1].named_parameters())


def assert_equal() -> None:
    """Compare the bits of both models, and of all ranks."""
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs), f"step {Now.step}: {(ours - theirs).abs().max()}"
    hvd.check_replicas(models[0].named_parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    """Train until three ranks have met again."""
    first = Now.step = state.step
    while Now.step < STEPS or hvd.size() < 3 or Now.step < first + 2 * COMMIT:
        die_at("step")
        if 0 < first == Now.step - 5 and hvd.size() == 3 and not Now.failed:
            Now.failed = True
            raise hvd.HorovodInternalError("planned")
        for model, optimizer in zip(models, (sharded, plain), strict=True):
            optimizer.zero_grad()
            numbers = torch.Generator().manual_seed(1000 * Now.step + WORKER)
            x = torch.randn(16, 12, generator=numbers)
            (model(x) - x.flip(1).sin()).square().mean().backward()
        for optimizer in (plain, sharded):
            optimizer.step()
        assert_equal()
        Now.step += 1
        state.step = Now.step
        if Now.step % COMMIT == 0:
            state.commit()
        time.sleep(0.01)  # A worker that joins needs the processor, too.


train(
    hvd.elastic.TorchState(
        model=models[0], optimizer=sharded, other=models[1], other_optimizer=plain, step=0
    )
)
assert Now.failed
held = len(sharded.state)
assert held < 8, held
assert int(hvd.allreduce(torch.tensor(held), op=hvd.Sum, name="held")) == 16
sharded.consolidate(to=0)
if hvd.rank() == 0:
    ours, theirs = (one.state_dict()["state"] for one in (sharded, plain))
    assert ours.keys() == theirs.keys()
    for index, values in theirs.items():
        assert all(torch.equal(value, ours[index][key]) for key, value in values.items())
print(f"worlds {[len(epoch.workers) for epoch in epochs.history()]}", flush=True)
