"""A worker that trains with virtual ranks: `python virtual_worker.py PLAN`, see `plans.Plan`.

At its end each worker writes a hash of all that the training has made. A process that is not in a
job trains undisturbed, and prints the hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from typing import Any

import torch
from plans import Faults, Journal, Plan, read_plan, watch_membership_thread
from torch import nn
from torch.nn import functional

import hvdlite.torch as hvd
from hvdlite.torch.virtual.steps import Buffers, VirtualSteps

VIRTUAL_SIZE = 8
BATCH = 4
STEPS = 6  # of an epoch
ALONE = "HVDLITE_WORKER" not in os.environ


class Training:
    """A model with dropout and batch normalization, and where its worker dies."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.journal = None if ALONE else Journal(plan.folder)
        self.faults = None if self.journal is None else Faults(plan.faults, self.journal)
        if self.faults is not None:
            watch_membership_thread(self.faults)
        self.step = 0
        hvd.init()
        torch.manual_seed(1)
        self.model = nn.Sequential(
            *(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)),
            nn.Linear(16, 1),
        )
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(adamw, virtual_size=VIRTUAL_SIZE)
        data = torch.randn(VIRTUAL_SIZE * BATCH * STEPS + 3, 8)
        dataset = torch.utils.data.TensorDataset(data, data.sin().sum(1, keepdim=True))
        sampler = hvd.VirtualBatchSampler(
            dataset, batch_size=BATCH, virtual_size=VIRTUAL_SIZE, seed=5
        )
        self.loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, epoch=0, losses=[])
        self.model[2].register_forward_hook(lambda *_: self.come_to("forward"))
        self.model[0].weight.register_post_accumulate_grad_hook(lambda _: self.come_to("backward"))

    def come_to(self, point: str) -> None:
        """Suffer what is planned for this point of the step under way."""
        if self.faults is not None:
            self.faults.come_to(point, self.step)

    def watch_reduction(self) -> None:
        """Add points between the parts of a reduction."""
        finish, ask = Buffers.finish, VirtualSteps._is_of_one_world

        def finishing(buffers: Buffers, *arguments: Any) -> None:
            self.come_to("buffers")
            finish(buffers, *arguments)

        def asking(steps: VirtualSteps) -> bool:
            self.come_to("question")
            answer = ask(steps)
            if not answer and self.journal is not None:
                self.journal.write("again", step=self.step)
            self.come_to("answer")
            return answer

        Buffers.finish, VirtualSteps._is_of_one_world = finishing, asking  # type: ignore[method-assign]

    def train(self, state: Any) -> None:
        """Make all steps that are left."""
        while state.epoch < self.plan.steps:
            for step in self.optimizer.virtual_steps(self.loader, state.epoch, self.model):
                self.step = len(state.losses)
                if not ALONE and self.step % self.plan.hold_at == 0:
                    self.hold(state)
                if self.step == self.plan.unredoable_at:
                    self.come_to("broadcast")
                    hvd.broadcast(torch.ones(1), root_rank=hvd.size() - 1, name="last")
                self.optimizer.zero_grad(set_to_none=self.step % 2 == 0)
                for inputs, targets in step:
                    loss = functional.mse_loss(self.model(inputs), targets)
                    loss.backward()
                    step.record(loss)
                self.come_to("before step")
                self.optimizer.step()
                state.losses.append(step.loss)
                self.come_to("after step")
                if self.step % self.plan.commit_every == 0:
                    state.commit()
            state.epoch += 1

    def hold(self, state: Any) -> None:
        """Go from boundary to boundary until there are the planned ranks."""
        # The ranks count together: one may read `hvd.size()` before a death and another after it.
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="ranks") < self.plan.hold_until:
            time.sleep(0.01)
            state.check_host_updates()

    def hash(self) -> str:
        """Return the SHA-256 of parameters, buffers, the optimizer's state and all losses."""
        digest = hashlib.sha256(repr(self.state.losses).encode())
        states = self.optimizer.state_dict()["state"]
        values = [*self.model.state_dict().values()]
        values += [one for state in states.values() for one in state.values()]
        for value in values:
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def main() -> None:
    """Train to the end."""
    training = Training(Plan(**json.loads(sys.argv[1])) if ALONE else read_plan())
    training.watch_reduction()
    hvd.elastic.run(training.train)(training.state)
    if training.journal is None:
        print(training.hash())
    else:
        training.journal.write("end", hash=training.hash())
    hvd.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
