"""A model of an elastic job whose workers run one script in lockstep, for tests of samplers.

Each worker has a sampler, and records of steps and epochs of its own. Deaths, joins, boundaries,
errors and dropped steps come at random places. The model counts which samples were trained on.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from types import TracebackType
from typing import Any

from hvdlite.rendezvous import epochs
from hvdlite.rendezvous.epochs import Epoch
from hvdlite.torch.data import ElasticSampler

STYLES = ("top", "pass", "pass, late commit", "step", "step, late commit")


def forget_epochs() -> None:
    """Be as a process that has just started."""
    epochs._progress = epochs.Progress()
    epochs._history.clear()
    epochs._steps.clear()


class Process:
    """One worker: within `with` the modules' records are this worker's."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.progress = epochs.Progress(announced=True)
        self.step_epochs: list[tuple[int, int]] = []
        self.history: list[Epoch] = []
        self.sampler: Any = None
        self.saved: Any = None
        self.batches: list[list[tuple[int, bool]]] = []

    def __enter__(self) -> Process:
        epochs._progress = self.progress
        epochs._steps[:] = self.step_epochs
        epochs._history[:] = self.history
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        self.progress = epochs._progress
        self.step_epochs = list(epochs._steps)
        self.history = list(epochs._history)


class Boundary(Exception):
    """All workers leave the function that trains."""


class Job:
    """An elastic job that trains one pass over `samples` samples."""

    def __init__(self, chance: random.Random, style: str, samples: int) -> None:
        self.chance = chance
        self.style = style
        self.samples = samples
        self.batch = chance.randint(1, 4)
        self.passes = chance.choice([1, 1, 2, 3])
        self.drops = chance.choice([0.0, 0.04])
        self.epoch = -1
        self.born = 0
        self.calm = False
        self.distributed_anew = False  # whether data is to be distributed anew
        self.restored = False
        self.trained: Counter[int] = Counter()
        self.repeated = 0
        self.declared = 0
        self.skipped: set[int] = set()
        self.at_save: Any = None
        self.alive: list[Process] = []
        self.alive = [self.start() for _ in range(chance.randint(1, 5))]
        self.form("start")
        for one in self.alive:
            with one:
                one.sampler = self.make_sampler()
        self.save()

    def start(self) -> Process:
        self.born += 1
        return Process(self.born - 1)

    def make_sampler(self) -> ElasticSampler:
        return ElasticSampler(range(self.samples), seed=7)

    def form(self, reason: str) -> None:
        self.epoch += 1
        workers = tuple(one.worker for one in self.alive)
        for one in self.alive:
            one.history.append(Epoch(self.epoch, workers, one.worker, reason))

    def happens(self, probability: float) -> bool:
        return not self.calm and self.chance.random() < probability

    def deaths(self) -> None:
        """Perhaps let workers die here; the others go on in place."""
        gone = [one for one in self.alive if self.happens(0.02)]
        if gone and len(gone) < len(self.alive):
            self.alive = [one for one in self.alive if one not in gone]
            self.form(f"workers {[one.worker for one in gone]} died")
            self.distributed_anew = True

    def save(self) -> None:
        self.at_save = (self.trained.copy(), self.repeated, set(self.skipped))
        for one in self.alive:
            with one:
                one.saved = pickle.loads(pickle.dumps(one.sampler.state_dict()))

    def commit(self) -> None:
        self.save()
        if self.distributed_anew or self.happens(0.1):
            raise Boundary

    def fail(self) -> None:
        """Raise HorovodInternalError in all workers, which restore what they saved."""
        self.trained, self.repeated, self.skipped = (
            self.at_save[0].copy(),
            self.at_save[1],
            set(self.at_save[2]),
        )
        for one in self.alive:
            with one:
                one.sampler.load_state_dict(one.saved)
        self.restored = True
        raise Boundary

    def cross_boundary(self) -> None:
        """Let workers leave and join, and distribute anew, with a sync or without."""
        while len(self.alive) > 1 and self.happens(0.2):
            self.alive.remove(self.chance.choice(self.alive))
        joiners = [self.start() for _ in range(self.chance.randint(0, 2)) if self.happens(0.5)]
        self.alive += joiners
        self.form("a boundary")
        for one in self.alive:
            with one:
                epochs.drop_step()
                if one in joiners:
                    one.sampler = self.make_sampler()
                else:
                    one.sampler.reset()
        if joiners or self.restored or self.happens(0.3):
            with self.alive[0] as root:
                state = pickle.dumps(root.sampler.state_dict())
            for one in self.alive:
                with one:
                    one.sampler.load_state_dict(pickle.loads(state))
            self.save()
        self.distributed_anew = self.restored = False

    def enter(self) -> None:
        """Begin the loops; all workers must distribute in the same way."""
        self.declared += self.alive[0].sampler.padded
        states = []
        others = self.chance.choice([0, 0, 2])  # steps of another optimizer
        for one in self.alive:
            with one:
                for _ in range(others):
                    epochs.begin_step()
                    epochs.commit_step(self.epoch)
                states.append(one.sampler.state_dict())
                own = list(one.sampler)
                assert own == list(one.sampler)
                assert len(own) == len(one.sampler)
                replicas, replica = one.sampler.num_replicas, one.sampler.rank
                assert (replicas, replica) == (len(self.alive), self.alive.index(one))
            left = len(one.sampler.remaining_indices)
            marked = [(x, replica + i * replicas >= left) for i, x in enumerate(own)]
            one.batches = [marked[i : i + self.batch] for i in range(0, len(marked), self.batch)]
        assert all(state == states[0] for state in states)

    def record(self, size: int | None = None) -> None:
        for one in self.alive:
            with one:
                one.sampler.record_batch(0, self.batch if size is None else size)

    def step(self, numbers: range) -> None:
        """Do the passes and the step of these batches, and records, and what goes wrong."""
        top, by_pass = self.style == "top", self.style.startswith("pass")
        late = self.style.endswith("late commit")
        for number in numbers:
            last = number == numbers[-1]
            if top:
                self.record()
            self.deaths()
            if self.happens(0.1):
                self.commit()
            if self.happens(0.02):
                self.fail()
            for one in self.alive:
                with one:
                    epochs.begin_step()
            self.deaths()
            if last and not late:
                self.end_step(numbers)
            self.deaths()
            if by_pass:
                self.record()
            if last and late and by_pass:
                self.end_step(numbers)
        if self.style == "step, late commit":
            self.record(self.batch * len(numbers))
            self.end_step(numbers)
        elif self.style == "step":
            self.record(self.batch * len(numbers))
        self.deaths()

    def end_step(self, numbers: range) -> None:
        dropped = self.happens(self.drops)
        for one in self.alive:
            samples = [x for number in numbers for x in one.batches[number]]
            with one:
                if dropped:
                    epochs.drop_step()
                    self.skipped.update(x for x, _ in samples)
                    continue
                epochs.commit_step(self.epoch)
            self.trained.update(x for x, is_padding in samples if not is_padding)
            self.repeated += sum(is_padding for _, is_padding in samples)

    def train(self) -> None:
        """Run the function that trains until one pass over the data is over."""
        for entry in itertools.count():
            self.calm = entry > 12
            try:
                self.enter()
                batches = len(self.alive[0].batches)
                for first in range(0, batches, self.passes):
                    self.step(range(first, min(first + self.passes, batches)))
                    if self.happens(0.1):
                        self.commit()
                self.commit()
            except Boundary:
                self.cross_boundary()
            else:
                return
