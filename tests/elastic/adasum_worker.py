"""A worker that steps by Adasum, and dies in the middle of a step: `python adasum_worker.py`.

The gradients of the workers are orthogonal, so Adasum adds them up. Every element of a weight
belongs to a worker, and tells in how many steps that worker took part. There are several requests
per step; the weights of all of them must be equal, or a step had mixed ranks.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.elastic import steps
from hvdlite.torch.optimizers import adasum

STEPS, BUCKETS = 10, 5
DEATHS = {2: (3, 3), 0: (6, 1)}  # by worker: the step, and the request of the step that is not sent
WORKER = int(os.environ["HVDLITE_WORKER"])


class Sent:
    """Counts the requests of a step, and kills this worker when its time has come."""

    step = 0
    requests = 0

    @classmethod
    def count(cls, *args: Any, **options: Any) -> Any:
        """Submit a request, or die when those before it can have ended."""
        if DEATHS.get(WORKER) == (cls.step, cls.requests):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        cls.requests += 1
        return submit(*args, **options)


submit, adasum.start_reducing = adasum.start_reducing, Sent.count


@hvd.elastic.run
def train(state: Any) -> None:
    """Make all steps; no rank joins, because nothing is committed."""
    for Sent.step in range(STEPS):
        Sent.requests = 0
        optimizer.zero_grad()
        torch.stack([weight[WORKER] for weight in weights]).sum().backward()
        assert steps.progress().under_way
        optimizer.step()
        values = [(-weight).tolist() for weight in weights]
        assert values == [values[0]] * BUCKETS, f"step {Sent.step} of mixed ranks: {values}"
    print(f"steps {values[0]}, committed {steps.progress().committed}", flush=True)


hvd.init()
weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(BUCKETS)]
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(weights, lr=1.0), op=hvd.Adasum, bucket_cap_mb=12 / (1 << 20)
)
train(hvd.elastic.TorchState(optimizer=optimizer))
