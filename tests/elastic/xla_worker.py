"""A worker whose steps XLA compiles: `python xla_worker.py`.

Worker 2 dies while the others wait in a compiled step, which they redo. Worker 1 dies while rank 0
waits in a compiled step of a process set of both, which rank 0 cannot redo: it goes back to its
last commit. It prints the weight, to which each step adds the number of its ranks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import tensorflow as tf

import hvdlite.tensorflow as hvd

STEPS = 10
DEATHS = {2: 3, 1: 7}  # the step in which a worker dies

pair = hvd.ProcessSet([0, 1])
weight = tf.Variable(0.0)


@tf.function(jit_compile=True)
def step() -> None:
    """Add the number of ranks to the weight."""
    weight.assign_add(hvd.allreduce(tf.ones([]), op=hvd.Sum, name="ranks"))


@tf.function(jit_compile=True)
def pair_step() -> None:
    """Add something that the weight does not keep if the call fails."""
    ranks = hvd.allreduce(tf.ones([]), op=hvd.Sum, name="pair", process_set=pair)
    weight.assign_add(ranks - 2.0)


@hvd.elastic.run
def train(state: Any) -> None:
    """Make the steps that are left."""
    print(f"enters at {state.step} with {float(weight)}", flush=True)
    while state.step < STEPS:
        if DEATHS.get(int(os.environ["HVDLITE_WORKER"])) == state.step:
            os.kill(os.getpid(), signal.SIGKILL)
        if pair.process_set_id is not None and pair.included():
            pair_step()
        step()
        state.step += 1
        if state.step % 5 == 0:
            state.commit()


hvd.init(process_sets=[pair])
train(hvd.elastic.TensorFlowState([weight], step=0))
print(f"weight {float(weight)}", flush=True)
