"""A worker that trains with torch: `python torch_worker.py PLAN`, see `plans.Plan`.

Each parameter has an element for each sample, from which a step takes the same whole number for
every sample that it has used. So this worker sees in each step whether it was done once, for all
parameters, by all ranks of its epoch and by no other; and at its end whether all samples were used.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from plans import Faults, Journal, Plan, read_plan, watch_membership_thread, watch_notices

import hvdlite.torch as hvd
from hvdlite.errors import UnreducedGradientsWarning
from hvdlite.rendezvous import epochs
from hvdlite.torch import local_sgd
from hvdlite.torch.buckets import Bucket

BATCH, BUCKETS, SAMPLES = 4, 5, 204
PARTS = 12  # the gradient of a sample, divided by any number of ranks up to 4
MIDDLE = BUCKETS // 2
OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}

torch.set_num_threads(1)
warnings.simplefilter("error")
# The last step of an epoch may have fewer passes.
warnings.simplefilter("ignore", UnreducedGradientsWarning)


class Model(torch.nn.Module):
    """Parameters with an element for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(SAMPLES) for _ in range(BUCKETS))
        self.norm = hvd.SyncBatchNorm(1, affine=False)

    def forward(self, indices: list[int]) -> torch.Tensor:
        """Return a number that has the planned gradients."""
        return torch.stack([PARTS * weight[indices].sum() for weight in self.weights]).sum()


class Descent(torch.optim.SGD):
    """Half-way through its step is a point."""

    come_to: Any

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change all weights."""
        for number, weight in enumerate(self.param_groups[0]["params"]):
            if number == MIDDLE:
                self.come_to("in step")
            weight -= weight.grad


class Trainer:
    """The loop of one worker."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.journal = Journal(plan.folder)
        self.faults = Faults(plan.faults, self.journal)
        watch_membership_thread(self.faults)
        watch_notices(self.faults)
        hvd.init()
        self.model = Model()
        self.sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=3)
        self.loader = torch.utils.data.DataLoader(
            self.sampler.dataset, batch_size=BATCH, sampler=self.sampler, collate_fn=list
        )
        self.optimizer = self.make_optimizer()
        self.state = hvd.elastic.TorchState(
            self.model,
            self.optimizer,
            sampler=self.sampler,
            epoch=0,
            step=0,
            used=torch.zeros(SAMPLES),
            repeats=0,
        )
        self.model.weights[MIDDLE].register_post_accumulate_grad_hook(
            lambda _: self.come_to("in hook")
        )

    def make_optimizer(self) -> Any:
        """Make the optimizer of the plan, and points within it."""
        Descent.come_to = staticmethod(self.come_to)
        base = Descent(self.model.parameters(), lr=1.0)
        if self.plan.op == "local":
            start = local_sgd.start_reducing

            def starting(*arguments: Any, **options: Any) -> Any:
                handle = start(*arguments, **options)
                self.come_to("round")
                return handle

            local_sgd.start_reducing = starting
            return hvd.LocalSGD(base, every=5, outer_momentum=0.3)
        how: dict[str, Any] = {"op": OPS[self.plan.op]}
        if self.plan.op == "adasum":
            submit = Bucket.submit

            def submitting(*arguments: Any, **options: Any) -> Any:
                self.faults.come_to("request")
                return submit(*arguments, **options)

            Bucket.submit = submitting  # type: ignore[method-assign]
            how["bucket_cap_mb"] = 4 * SAMPLES / (1 << 20)
        else:
            how |= {"num_groups": 3, "overlap": True}  # A hook comes between two of them.
        if self.plan.compressed:
            how["compression"] = hvd.Compression.bf16
        return hvd.DistributedOptimizer(
            base, self.model.named_parameters(), backward_passes_per_step=self.plan.passes, **how
        )

    def come_to(self, point: str) -> None:
        """Suffer what is planned for this point of the pass under way."""
        self.faults.come_to(point, self.state.step)

    def train(self, state: Any) -> None:
        """Make all epochs that are left."""
        self.journal.write("enter", step=state.step, size=hvd.size(), samples=len(self.sampler))
        while state.epoch < self.plan.steps:
            state.repeats += self.sampler.padded
            own = 0  # samples of this step
            for number, indices in enumerate(self.loader, start=1):
                if state.step == self.plan.hold_at:
                    self.hold(state)
                self.make_pass(indices)
                own += len(indices)
                if number % self.plan.passes == 0 or number == len(self.loader):
                    self.make_step(state, own)
                    own = 0
                self.sampler.record_batch(0, len(indices))
                state.step += 1
                if state.step % self.plan.commit_every == 0:
                    self.commit(state)
                time.sleep(self.plan.pause)
            self.commit(state)
            state.epoch += 1
            if self.plan.op != "local":
                self.check_samples(state)
            self.sampler.set_epoch(state.epoch)

    def commit(self, state: Any) -> None:
        """Commit, at one point, and look for updates, at another."""
        self.come_to("commit")
        if self.plan.op == "local":
            self.optimizer.average()
            hvd.check_replicas(self.model.named_parameters())
        state.commit()

    def hold(self, state: Any) -> None:
        """Go from boundary to boundary until there are the planned ranks."""
        # The ranks count together: one may read `hvd.size()` before a death and another after it.
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="ranks") < self.plan.hold_until:
            time.sleep(0.01)
            self.commit(state)

    def make_pass(self, indices: list[int]) -> None:
        """Do the forward and backward passes of these samples."""
        loss = self.model(indices)
        self.come_to("batch norm")
        # Twice, since a single rank refuses a single sample, as torch does.
        self.model.norm(torch.tensor(2 * indices, dtype=torch.float32).reshape(-1, 1))
        self.come_to("before backward")
        loss.backward()

    def make_step(self, state: Any, own: int) -> None:
        """Make a step of so many samples on each rank, and check what it has done."""
        before = [weight.detach().clone() for weight in self.model.weights]
        self.come_to("before step")
        self.optimizer.step()
        self.come_to("after step")
        self.optimizer.zero_grad()
        if self.plan.op != "local":
            changes = [
                old - new.detach() for old, new in zip(before, self.model.weights, strict=True)
            ]
            self.check_step(state, own, changes)
        ranks = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric")
        self.come_to("metric")
        assert 1 <= int(ranks) <= 4

    def check_step(self, state: Any, own: int, changes: list[torch.Tensor]) -> None:
        """Check that the ranks of one epoch, and only they, have made this step."""
        assert all(torch.equal(change, changes[0]) for change in changes), "mixed ranks"
        epoch = epochs.progress().epoch
        assert epoch is not None
        ranks = epochs.find(epoch).size
        if self.plan.op == "adasum":  # It adds up what different samples give, and nearly so else.
            used = (changes[0] / PARTS).round()
        else:
            used = changes[0] / (PARTS / ranks if self.plan.op == "average" else PARTS)
            assert torch.equal(used, used.round()), f"{used.tolist()} of {ranks} ranks"
            assert used.sum() == ranks * own, f"{used.sum()} samples of {ranks} ranks"
        state.used += used
        hvd.check_replicas(self.model.state_dict().items())

    def check_samples(self, state: Any) -> None:
        """Check that each epoch so far has used every sample, and repeated only what pads it."""
        missing = [n for n, used in enumerate(state.used.tolist()) if used < state.epoch]
        assert not missing, f"samples {missing} were not used in each epoch"
        repeats = int(state.used.sum()) - state.epoch * SAMPLES
        assert repeats <= state.repeats, f"{repeats} samples were used again"


def main() -> None:
    """Train to the end."""
    trainer = Trainer(read_plan())
    hvd.elastic.run(trainer.train)(trainer.state)
    trainer.journal.write("end", ranks=hvd.size())
    hvd.shutdown()


if __name__ == "__main__":
    main()
