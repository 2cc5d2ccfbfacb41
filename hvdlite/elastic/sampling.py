"""Distributes the samples of one pass over a data set to workers, and again when the world changes.

The *order* of the samples is the same on all ranks. A *segment* lasts from one distribution to the
next: what remains then is distributed to n *replicas*, one for each worker of the world. Replica s
gets the positions s, s+n, s+2n, ... of what remains. All replicas get equally many, so some of them
repeat a sample at the end: the *padding*, at most n-1 samples for one segment.

For a segment it is enough to know how many samples each replica has done, because a replica does
its own in order. These numbers are the same on all ranks: in a step every rank of the step's world
does equally many samples, so each rank also knows what the others did, even those that have died
since. A *record* of a batch therefore counts for the replicas of the workers that made the batch's
step.

Nothing here knows of threads, engines or frameworks.

Example:
    >>> segment = Segment(10, workers=(0, 1))
    >>> segment.count(2)  # both have done two: positions 0 to 3
    >>> segment.count(1, workers=(0,))  # worker 1 died; worker 0 went on with position 4
    >>> closed = close((), segment)
    >>> remaining("abcdefghij", closed)
    ['f', 'g', 'h', 'i', 'j']
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hvdlite.rendezvous.epochs import Progress

Item = TypeVar("Item")

# It says how many samples each replica of a segment that is over has done.
Done = tuple[int, ...]


def remaining(order: Sequence[Item], closed: Sequence[Done]) -> list[Item]:
    """Return the samples that no replica of the closed segments has done, in their order."""
    left = list(order)
    for done in closed:
        left = _without(left, done)
    return left


def _without(items: list[Item], done: Done) -> list[Item]:
    replicas = len(done)
    # Before `low` everything is done, and from `high` on nothing.
    low, high = min(done) * replicas, max(done) * replicas
    between = enumerate(items[low:high], start=low)
    return [item for j, item in between if j // replicas >= done[j % replicas]] + items[high:]


def left_over(samples: int, closed: Sequence[Done]) -> int:
    """Return how many of the samples `remaining` returns, without the order."""
    for done in closed:
        samples -= _done_once(samples, done)
    return samples


def _done_once(samples: int, done: Sequence[int]) -> int:
    """Count the samples that are done, without the padding."""
    return sum(min(one, _own(samples, len(done), s)) for s, one in enumerate(done))


def _own(samples: int, replicas: int, replica: int) -> int:
    """Count the positions that a replica gets, without the padding."""
    return (samples - replica + replicas - 1) // replicas


def take(
    left: Sequence[Item], replicas: int, replica: int, padding: Sequence[Item] | None = None
) -> list[Item]:
    """Return what one of the replicas gets of the samples that remain, with the padding."""
    # The padding repeats samples from the beginning of `padding`, by default from that of `left`.
    own = list(left[replica::replicas])
    if len(own) < -(-len(left) // replicas):
        repeated = left if padding is None else padding
        own.append(repeated[(replica + len(own) * replicas - len(left)) % len(repeated)])
    return own


def close(closed: tuple[Done, ...], segment: Segment) -> tuple[Done, ...]:
    """Return the closed segments with this one as the last."""
    done = tuple(segment.done)
    if max(done) == 0:
        return closed
    # Where all replicas have done equally many samples, the samples are simply the first ones. Then
    # one number is kept, and neighbours are added up: most jobs need a single number for an epoch.
    if min(done) < max(done):
        return (*closed, done)
    first = min(segment.samples, done[0] * len(done))
    if closed and len(closed[-1]) == 1:
        return (*closed[:-1], (closed[-1][0] + first,))
    return (*closed, (first,))


@dataclass
class _Record:
    """Samples that this rank has done, and the step that they belong to."""

    size: int
    step: int  # Its number; 0 is any step of `epoch`.
    epoch: int | None  # The step's, or that of the time of the record; None: all replicas count.


class Segment:
    """What is distributed in one segment, and what its replicas have done of it."""

    # A record belongs to the last step, or to the next one, whose gradients may be under way:
    # scripts record a batch after `optimizer.step()`, before it, at the top of their loop, or after
    # each of several backward passes. Gradients under way mean the next step. So does a first
    # record that came before any gradient of the segment, and this then holds for the whole
    # segment. A record of the next step counts when the step is committed. If the segment is closed
    # first, it does not count. If the step is dropped and the script goes on, it counts with the
    # step after it.

    def __init__(self, samples: int, workers: Sequence[int], ended: int = 0) -> None:
        """Distribute the samples that remain, after `ended` steps (`Progress.ended`)."""
        self.samples = samples
        self.workers = tuple(workers)  # The worker of each replica, in the order of the ranks.
        self.done = [0] * len(self.workers)  # It counts each replica's samples, with the padding.
        self._ended = ended
        self._before: bool | None = None  # It tells whether records come before their steps.
        self._records: list[_Record] = []  # These do not count yet.

    @property
    def share(self) -> int:
        """How many samples each replica gets, with the padding."""
        return -(-self.samples // len(self.workers))

    @property
    def padded(self) -> int:
        """How many samples are repeated so that all replicas get equally many."""
        return self.share * len(self.workers) - self.samples

    @property
    def processed(self) -> int:
        """How many samples are done, without the padding."""
        return _done_once(self.samples, self.done)

    def begin(self, ended: int) -> None:
        """Note how many steps had ended when the loop over the samples began."""
        if self._before is None:
            self._ended = ended

    def count(self, size: int, workers: Collection[int] | None = None) -> None:
        """Count samples as done by the replicas of these workers; None: by all replicas."""
        share = self.share
        chosen = None if workers is None or workers == self.workers else set(workers)
        for replica, worker in enumerate(self.workers):
            if chosen is None or worker in chosen:
                # A last batch is often recorded with the size of a full one.
                self.done[replica] = min(share, self.done[replica] + size)

    def record(self, size: int, progress: Progress, epoch: int) -> None:
        """Note samples that this rank has done, or is about to do; `settle` counts them."""
        # If nobody reports steps, the samples count for the workers of the present `epoch`.
        if self._before is None:
            self._before = not progress.under_way and progress.ended == self._ended
        if progress.under_way or self._before:
            self._records.append(_Record(size, progress.committed + 1, epoch))
        else:
            self._records.append(_Record(size, 0, progress.epoch))

    def settle(
        self,
        announced: bool,
        epoch_of: Callable[[int], int | None],
        workers_in: Callable[[int], Collection[int]],
    ) -> None:
        """Count the records whose steps are committed; all of them if no steps are announced."""
        # `epoch_of` returns the epoch of a step, None if the step is not committed, and
        # `workers_in` returns the workers of an epoch.
        records, self._records = self._records, []
        for record in records:
            epoch = record.epoch
            if record.step and announced:
                epoch = epoch_of(record.step)
                if epoch is None:
                    self._records.append(record)
                    continue
            self.count(record.size, None if epoch is None else workers_in(epoch))

    def missed(self, replica: int, workers: Collection[int]) -> dict[int, int]:
        """Return how many samples each worker that is gone has stayed behind this rank."""
        # The padding does not count, and a worker that is not behind is left out. `workers` are
        # those of the present world.
        # A replica that has not done anything is taken to have done all.
        reached = self.done[replica] or self.share
        missed: dict[int, int] = {}
        for other, worker in enumerate(self.workers):
            own = _own(self.samples, len(self.workers), other)
            behind = min(reached, own) - self.done[other]
            if worker not in workers and behind > 0:
                missed[worker] = behind
        return missed
