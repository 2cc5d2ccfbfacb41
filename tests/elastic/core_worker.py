"""A worker that trains without a framework: `python core_worker.py PLAN`, see `plans.Plan`.

A step reduces small buckets and a large one in place, as one transaction, as torch's reducer does.
Weights are integers below `PRIME`, so sums are exact and the same in any order of ranks. A gradient
depends on the worker, the step, and the weights before the step, so a step that is lost, done
twice, done by other ranks, or computed from other weights changes all weights after it.
"""

from __future__ import annotations

import copy
import ctypes
import time
from array import array
from typing import Any

from plans import (
    Faults,
    Journal,
    Plan,
    read_plan,
    this_worker,
    watch_membership_thread,
    watch_notices,
)

import hvdlite
from hvdlite import _core, basics
from hvdlite.elastic.state import State
from hvdlite.errors import HvdliteError
from hvdlite.rendezvous import epochs

_SUM = _core.REDUCE_OPS["sum"]
_INT64 = _core.DTYPES["int64"]
_TRANSACTION = "step"
BUCKETS = 5
LARGE = 1 << 17  # elements of the last bucket
PRIME = 1_000_003


def contribution(worker: int, step: int, bucket: int, weight: int) -> int:
    """Return the gradient of one worker in one bucket, in every element."""
    return ((worker + 1) * 7919 + (step + 1) * 104729 + bucket * 31 + weight * weight) % PRIME


class Weights(State):
    """The weights of all buckets, and the number of the next step."""

    def __init__(self, faults: Faults, journal: Journal) -> None:
        super().__init__(_broadcast, basics.rank)
        self.values, self.step = [7 + number for number in range(BUCKETS)], 0
        self._faults = faults
        self._journal = journal
        self.save()

    def save(self) -> None:
        self._faults.come_to("commit", self.step)
        self._saved = (list(self.values), self.step)

    def restore(self) -> None:
        self._faults.come_to("restore")
        self.values, self.step = copy.deepcopy(self._saved)
        self._journal.write("restored", step=self.step)

    def sync(self) -> None:
        values: list[int] = self._bcast_object(self.values)
        self._faults.come_to("sync")
        self.step = self._bcast_object([self.step])[0]
        self.values = values
        self.save()


def _broadcast(numbers: list[int]) -> list[int]:
    cells = (ctypes.c_int64 * len(numbers))(*numbers)
    address = ctypes.addressof(cells)
    tensor = _core.Tensor("state", _INT64, [len(numbers)], address, address)
    basics.engine().broadcast("state", [tensor], 0, keep=cells).wait()
    return list(cells)


def _submit(name: str, cells: array[int], transaction: str = "") -> _core.Handle:
    address = cells.buffer_info()[0]
    tensor = _core.Tensor(name, _INT64, [len(cells)], address, address)
    return basics.engine().allreduce(name, [tensor], _SUM, keep=cells, transaction=transaction)


class Trainer:
    """The loop of one worker."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.journal = Journal(plan.folder)
        self.faults = Faults(plan.faults, self.journal)
        watch_membership_thread(self.faults)
        watch_notices(self.faults)
        basics.init()
        self.state = Weights(self.faults, self.journal)

    def train(self, state: Weights) -> None:
        """Make all steps that are left."""
        self.journal.write("enter", step=state.step, size=basics.size())
        if state.step == self.plan.hold_at:
            self.hold(state)
        while state.step < self.plan.steps:
            self.make_step(state)
            self.count_ranks(state.step)
            if state.step % self.plan.commit_every == 0:
                state.commit()
            if state.step == self.plan.hold_at:
                self.hold(state)
            time.sleep(self.plan.pause)

    def hold(self, state: Weights) -> None:
        """Go from boundary to boundary until the planned epoch."""
        while self.count_ranks(state.step) < self.plan.hold_until:
            state.check_host_updates()
            time.sleep(0.01)

    def make_step(self, state: Weights) -> None:
        """Reduce the gradients of one step and apply them."""
        step, come_to = state.step, self.faults.come_to
        if step == self.plan.unredoable_at:
            come_to("unredoable", step)
            self._do_once(self.plan.unredoable)
        come_to("barrier", step)
        basics.engine().barrier("barrier").wait()
        come_to("before backward", step)
        epochs.begin_step()
        buckets, handles = [], []
        for number in range(BUCKETS):
            value = contribution(this_worker(), step, number, state.values[number])
            buckets.append(array("q", [value]) * (LARGE if number == BUCKETS - 1 else 8))
            handles.append(_submit(f"gradient.{number}", buckets[-1], _TRANSACTION))
            if number == BUCKETS // 2:
                come_to("some buckets", step)
        come_to("all buckets", step)
        commit = basics.engine().commit("commit", _TRANSACTION)
        come_to("commit submitted", step)
        try:
            for handle in (*handles, commit):
                handle.wait()
        except HvdliteError:
            epochs.drop_step()
            raise
        epochs.commit_step(commit.epoch)
        come_to("before step", step)
        self.apply(state, buckets, commit.epoch)
        come_to("after step", step)

    def _do_once(self, kind: str) -> None:
        size = basics.size()
        cells: Any = (ctypes.c_int64 * (2 * size))(*range(2 * size))
        address = ctypes.addressof(cells)
        tensor = _core.Tensor(kind, _INT64, [size], address, address + 8 * size)
        if kind == "alltoall":
            handle = basics.engine().alltoall(kind, tensor, keep=cells)
        elif kind == "reducescatter":
            handle = basics.engine().reducescatter(kind, [tensor], _SUM, keep=cells)
        else:
            handle = basics.engine().broadcast(kind, [tensor], 1, keep=cells)
        self.journal.write("once")
        handle.wait()

    def apply(self, state: Weights, buckets: list[array[int]], epoch: int) -> None:
        """Change the weights, and check by whom the gradients were made."""
        workers, step = epochs.find(epoch).workers, state.step
        for number, cells in enumerate(buckets):
            assert cells.count(cells[0]) == len(cells), f"bucket {number} is torn"
            if number == BUCKETS // 2:
                self.faults.come_to("in step", step)
            weight = state.values[number]
            right = sum(contribution(worker, step, number, weight) for worker in workers)
            assert cells[0] == right, f"bucket {number} of step {step} is not of {workers}"
            state.values[number] = (weight * 5 + cells[0]) % PRIME
        state.step += 1
        self.journal.write("done", step=step)

    def count_ranks(self, step: int) -> int:
        """Check a sum that is outside of any transaction, and return the epoch that made it."""
        cells = array("q", [step + 1])
        self.faults.come_to("metric", step)
        handle = _submit("metric", cells)
        self.faults.come_to("metric submitted", step)
        handle.wait()
        ranks = epochs.find(handle.epoch).size
        assert cells[0] == ranks * (step + 1), f"{cells[0]} is not {ranks} times {step + 1}"
        return handle.epoch

    def end(self) -> None:
        """Write down the end, and leave."""
        self.journal.write("end", weights=self.state.values, history=_history())
        basics.shutdown()


def _history() -> list[tuple[int, tuple[int, ...]]]:
    return [(epoch.number, epoch.workers) for epoch in hvdlite.elastic.history()]


def main() -> None:
    """Train to the end."""
    trainer = Trainer(read_plan())
    hvdlite.elastic.run(trainer.train)(trainer.state)
    trainer.end()


if __name__ == "__main__":
    main()
