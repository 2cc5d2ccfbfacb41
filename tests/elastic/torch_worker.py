"""A worker that trains with torch: `python torch_worker.py PLAN`, see `plans.Plan`.

It has a model, a DistributedOptimizer, a DataLoader over an ElasticSampler and a TorchState, as a
user's script has. Gradients are integers in float64, made from the samples and the weights, so that
the oracle can repeat every step to the bit.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from arithmetic import (
    BATCH,
    BUCKETS,
    ELEMENTS,
    PARTS,
    PRIME,
    SAMPLES,
    first_weights,
    sample_gradient,
)
from plans import Faults, Journal, Plan, read_plan, watch_membership_thread, watch_notices

import hvdlite.torch as hvd
from hvdlite.elastic import epochs, steps

torch.set_num_threads(1)


class Model(torch.nn.Module):
    """Parameters whose gradients are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((ELEMENTS,), float(weight), dtype=torch.float64))
            for weight in first_weights()
        )
        self.norm = hvd.SyncBatchNorm(1, affine=False)

    def values(self) -> list[int]:
        """Return the weights, which are alike in all elements."""
        assert all(bool((weight == weight[0]).all()) for weight in self.weights), "torn weights"
        return [int(weight[0].item()) for weight in self.weights]

    def forward(self, indices: list[int]) -> torch.Tensor:
        """Return a number that has the planned gradients."""
        parts = [
            (weight * float(sample_gradient(indices, number, value))).sum()
            for number, (weight, value) in enumerate(zip(self.weights, self.values(), strict=True))
        ]
        return torch.stack(parts).sum()


class Modular(torch.optim.Optimizer):
    """Changes weights so that each step can be told from every other one."""

    def __init__(self, params: Any, faults: Faults) -> None:
        super().__init__(params, {})
        self.faults = faults
        self.at = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change all weights; half-way is a point."""
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                if number == BUCKETS // 2:
                    self.faults.come_to("in step", self.at)
                change = torch.round(param.grad * PARTS)
                param.copy_(torch.remainder(param * 5 + change, PRIME))


class Trainer:
    """The loop of one worker."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.journal = Journal(plan.folder)
        self.faults = Faults(plan.faults, self.journal)
        watch_membership_thread(self.faults)
        watch_notices(self.faults)
        warnings.simplefilter("error")
        hvd.init()
        self.model = Model()
        self.base = Modular(self.model.parameters(), self.faults)
        self.sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=3)
        self.optimizer = hvd.DistributedOptimizer(
            self.base,
            self.model.named_parameters(),
            num_groups=3,
        )
        self.loader = torch.utils.data.DataLoader(
            self.sampler.dataset, batch_size=BATCH, sampler=self.sampler, collate_fn=list
        )
        self.state = hvd.elastic.TorchState(
            self.model, self.optimizer, sampler=self.sampler, epoch=0, step=0
        )
        self.step = 0
        middle = list(self.model.weights)[BUCKETS // 2]
        middle.register_post_accumulate_grad_hook(
            lambda _: self.faults.come_to("in hook", self.step)
        )

    def train(self, state: Any) -> None:
        """Make all epochs that are left."""
        self.journal.write("enter", step=state.step, size=hvd.size())
        while state.epoch < self.plan.steps:
            self.journal.write("distribution", epoch=state.epoch, padded=self.sampler.padded)
            for indices in self.loader:
                self.make_step(state, indices)
                self.sampler.record_batch(0, len(indices))
                if state.step % self.plan.commit_every == 0:
                    self.faults.come_to("commit", state.step)
                    state.commit()
            state.check_host_updates()
            state.epoch += 1
            self.sampler.set_epoch(state.epoch)

    def make_step(self, state: Any, indices: list[int]) -> None:
        """Make one step with these samples."""
        step, come_to = state.step, self.faults.come_to
        self.step = self.base.at = step
        self.journal.write("try", step=step, epoch=state.epoch, indices=indices)
        self.optimizer.zero_grad()
        loss = self.model(indices)
        come_to("batch norm", step)
        # Twice, since a single rank refuses a single sample, as torch does.
        self.model.norm(torch.tensor(2 * indices, dtype=torch.float32).reshape(-1, 1))
        come_to("before backward", step)
        loss.backward()
        come_to("before step", step)
        self.optimizer.step()
        come_to("after step", step)
        state.step += 1
        epoch = steps.progress().epoch
        assert epoch is not None
        workers = epochs.find(epoch).workers
        self.journal.write(
            "done",
            step=step,
            epoch=epoch,
            workers=workers,
            weights=self.model.values(),
            moments=[value.item() for value in self.model.norm.buffers()],
        )
        ranks = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric")
        come_to("metric", step)
        assert 1 <= int(ranks) <= len(workers)

    def end(self) -> None:
        """Write down the end, and leave."""
        history = [(epoch.number, epoch.workers) for epoch in hvd.elastic.history()]
        self.journal.write("end", weights=self.model.values(), history=history)
        hvd.shutdown()


def main() -> None:
    """Train to the end."""
    trainer = Trainer(read_plan())
    hvd.elastic.run(trainer.train)(trainer.state)
    trainer.end()


if __name__ == "__main__":
    main()
