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

from hvdlite.elastic.steps import Progress

Item = TypeVar("Item")

# Of a segment that is over: how many samples each of its replicas has done.
Done = tuple[int, ...]


def remaining(order: Sequence[Item], closed: Sequence[Done]) -> list[Item]:
    """Return the samples that no replica of the closed segments has done, in their order.

    Example:
        >>> remaining(range(8), [(2, 1, 1)])
        [4, 5, 6, 7]
    """
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
    """Return how many of the samples `remaining` returns, without the order.

    Example:
        >>> left_over(8, [(2, 1, 1)])
        4
    """
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
    """Return what a replica gets of the samples that remain, with the padding.

    Args:
        left: the samples that remain.
        replicas: how many replicas there are.
        replica: which of them this is.
        padding: the samples that are repeated, beginning with the first one; by default `left`.

    Example:
        >>> [take("abcde", 3, replica) for replica in range(3)]
        [['a', 'd'], ['b', 'e'], ['c', 'a']]
        >>> [take("a", 3, replica) for replica in range(3)]
        [['a'], ['a'], ['a']]
        >>> take("de", 3, 2, padding="abcde")
        ['a']
    """
    own = list(left[replica::replicas])
    if len(own) < -(-len(left) // replicas):
        repeated = left if padding is None else padding
        own.append(repeated[(replica + len(own) * replicas - len(left)) % len(repeated)])
    return own


def close(closed: tuple[Done, ...], segment: Segment) -> tuple[Done, ...]:
    """Return the closed segments with this one as the last.

    Where all replicas have done equally many samples, the samples are simply the first ones. Then
    one number is kept, and neighbours are added up: most jobs need a single number for an epoch.

    Example:
        >>> segment = Segment(10, workers=(0, 1))
        >>> segment.count(2)
        >>> close(((3,),), segment)
        ((7,),)
    """
    done = tuple(segment.done)
    if max(done) == 0:
        return closed
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
    step: int  # its number; 0: a step of `epoch`
    epoch: int | None  # of the step, or of the time of the record; None: all replicas


class Segment:
    """What is distributed in one segment, and what its replicas have done of it.

    A record belongs to the last step, or to the next one, whose gradients may be under way: scripts
    record a batch after `optimizer.step()`, before it, at the top of their loop, or after each of
    several backward passes. Gradients under way mean the next step. So does a first record that
    came before any gradient of the segment, and this then holds for the whole segment.
    A record of the next step counts when the step is committed. If the segment is closed first, it
    does not count. If the step is dropped and the script goes on, it counts with the step after it.

    Attributes:
        samples: how many samples are distributed.
        workers: the worker of each replica.
        done: how many samples each replica has done, with the padding.

    Example:
        >>> segment = Segment(6, workers=(4, 7))
        >>> segment.record(2, Progress(announced=True), epoch=1)  # at the top of the loop
        >>> segment.settle(True, {}.get, {1: (4, 7)}.__getitem__)
        >>> segment.done
        [0, 0]
        >>> segment.settle(True, {1: 1}.get, {1: (4, 7)}.__getitem__)  # the step was committed
        >>> segment.done
        [2, 2]
    """

    def __init__(self, samples: int, workers: Sequence[int], ended: int = 0) -> None:
        """Distribute samples.

        Args:
            samples: how many remain.
            workers: the workers in the order of their ranks.
            ended: how many steps had ended (`Progress.ended`).
        """
        self.samples = samples
        self.workers = tuple(workers)
        self.done = [0] * len(self.workers)
        self._ended = ended
        self._before: bool | None = None  # whether records come before their steps
        self._records: list[_Record] = []  # that do not count yet

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
        """Count samples as done by the replicas of these workers; None: by all replicas.

        A last batch is often recorded with the size of a full one, so a replica has done its share
        at most.
        """
        share = self.share
        chosen = None if workers is None or workers == self.workers else set(workers)
        for replica, worker in enumerate(self.workers):
            if chosen is None or worker in chosen:
                self.done[replica] = min(share, self.done[replica] + size)

    def record(self, size: int, progress: Progress, epoch: int) -> None:
        """Note samples that this rank has done, or is about to do; `settle` counts them.

        Args:
            size: how many.
            progress: how far this rank's steps are.
            epoch: the present one. If nobody reports steps, the samples count for its workers.
        """
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
        """Count the records whose steps are committed.

        Args:
            announced: whether steps are reported; if not, all records count.
            epoch_of: returns the epoch of a step; None if the step is not committed.
            workers_in: returns the workers of an epoch.
        """
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
        """Return how far workers that are gone have stayed behind this rank, in samples.

        Args:
            replica: the replica of this rank. If it has not done anything, it is taken to have done
                all.
            workers: the workers of the present world.

        Returns:
            The number of samples by worker, without the padding and without zeros.

        Example:
            >>> segment = Segment(10, workers=(0, 1))
            >>> segment.count(2)
            >>> segment.count(3, workers=(0,))
            >>> segment.missed(0, workers=(0,))
            {1: 3}
        """
        reached = self.done[replica] or self.share
        missed: dict[int, int] = {}
        for other, worker in enumerate(self.workers):
            own = _own(self.samples, len(self.workers), other)
            behind = min(reached, own) - self.done[other]
            if worker not in workers and behind > 0:
                missed[worker] = behind
        return missed
