"""A worker whose steps take several backward passes: `python accumulation_worker.py OP`.

Each sample adds one to a weight of its own. Worker 2 dies between two passes of a step, and the
others come to a boundary between two passes, too. It prints how often each sample was used.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import hvdlite.torch as hvd

SAMPLES, PASSES, DIES_AT = 60, 6, 7
OP = {"sum": hvd.Sum, "adasum": hvd.Adasum}[sys.argv[1]]


@hvd.elastic.run
def train(state: Any) -> None:
    """Use all samples once."""
    print(f"{hvd.size()} ranks, {len(sampler)} samples for each", flush=True)
    for index, sample in enumerate(sampler):
        if os.environ["HVDLITE_WORKER"] == "2" and index == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        weights[sample].backward()
        if index % PASSES == PASSES - 1 or index == len(sampler) - 1:
            optimizer.step()
            optimizer.zero_grad()
        sampler.record_batch(index, 1)
        time.sleep(0.01)  # so that the boundary comes before the step is complete
        state.commit()


hvd.init()
weights = torch.nn.Parameter(torch.zeros(SAMPLES))
sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=False)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weights], lr=1.0), op=OP, backward_passes_per_step=PASSES
)
train(hvd.elastic.TorchState(optimizer=optimizer, sampler=sampler))
print("used", *(-weights).int().tolist(), flush=True)
