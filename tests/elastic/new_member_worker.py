"""A worker whose optimizer reduces in a process set of `init`, of which its rank becomes a member.

Worker 0 dies; so worker 2, which was rank 2, becomes rank 1 and a member of the set of ranks 0 and
1. It never calls zero_grad().
"""

from __future__ import annotations

import os
import signal

import torch

import hvdlite.torch as hvd
from hvdlite.elastic import epochs

PAIR = hvd.ProcessSet([0, 1])
STEPS = 10

torch.set_num_threads(1)
hvd.init(process_sets=[PAIR])
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weight], lr=0.0), [("weight", weight)], op=hvd.Sum, process_set=PAIR
)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Make steps, and check over how many ranks each gradient was reduced."""
    print(f"{hvd.size()} ranks, member: {PAIR.included()}", flush=True)
    while state.step < STEPS:
        weight.grad = None
        weight.sum().backward()
        optimizer.step()
        assert weight.grad is not None
        assert weight.grad.tolist() == 3 * [2.0 if PAIR.included() else 1.0]
        state.step += 1
        if epochs.history()[-1].worker == 0 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()


train(hvd.elastic.TorchState(step=0))
