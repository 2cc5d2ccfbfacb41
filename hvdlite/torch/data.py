"""Samplers that resume within an epoch, also with another number of ranks: see `Segment`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hvdlite import basics
from hvdlite.errors import ArgumentError, ElasticSamplerWarning, UnrecordedSamplesWarning
from hvdlite.rendezvous import epochs

_VERSION = 1
_KEYS = {"version", "epoch", "consumed", "length", "seed", "shuffle"}


class DistributedSampler(torch.utils.data.DistributedSampler):  # type: ignore[misc]
    """Distributes the samples of an epoch to the ranks as torch's sampler does, and can be resumed.

    The indices of a fresh epoch are those of `torch.utils.data.DistributedSampler`. In your loop:

    1. Call `set_epoch` at the beginning of each epoch. It changes nothing if the sampler is in this
       epoch already, as it is after `load_state_dict`.
    2. Call `record` after each step, with the number of samples of this rank's batch. (A DataLoader
       loads ahead of the training loop, so the sampler cannot count them itself.)
    3. Put `state_dict()` into the checkpoint. It is the same on all ranks.

    After `load_state_dict` the sampler distributes what is left of the epoch. With the same number
    of ranks these are exactly the batches that the stopped job would have had. With another number
    each sample that is left comes once, and only the end of the epoch is padded.

    In an elastic job use `hvd.elastic.ElasticSampler`.

    Args:
        dataset: anything with a length, which stays the same; the same on all ranks.
        num_replicas: among how many ranks; by default `hvd.size()`.
        rank: which of them this is; by default `hvd.rank()`.
        shuffle: whether each epoch has an order of its own.
        seed: decides these orders, together with the epoch; the same on all ranks.
        drop_last: leave out the samples that cannot be distributed evenly, instead of repeating
            some.

    Attributes:
        epoch: the number of the epoch. The arguments are attributes, too.
        num_samples: how many samples each rank gets.
        total_size: how many samples all ranks together get, with the repeated ones.
        padded: how many samples are repeated so that all ranks get equally many.

    Raises:
        ArgumentError: there is no such rank.
        NotInitializedError: a number was left to hvdlite, and `init` was not called.

    Example:
        >>> import hvdlite.torch as hvd
        >>> hvd.init()
        >>> sampler = hvd.DistributedSampler(range(6), shuffle=False)
        >>> sampler.record(4)
        >>> resumed = hvd.DistributedSampler(range(6), shuffle=False)
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> list(resumed)
        [4, 5]
        >>> hvd.shutdown()
    """

    _drawn: int  # No iterator of this segment has given more indices.

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._fixed = (num_replicas, rank)  # The user may give size and rank.
        self._begin_epoch(())

    def set_epoch(self, epoch: int) -> None:
        """Begin the epoch of the number `epoch`, unless the sampler is in it already."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin_epoch(())

    def record(self, samples: int) -> None:
        """Record that this rank has trained on the next of its samples.

        Call it after the step, on all ranks with the same numbers.

        Args:
            samples: how many; for the last batch it may be the size of a full one.

        Raises:
            ArgumentError: the number is negative.
        """
        self._segment.count(_checked_size(samples))

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record `batch_size` samples; `batch_idx` is not used, as batches come in order."""
        self.record(batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return where the recorded samples end: a few numbers, alike on all ranks.

        Example:
            >>> import hvdlite.torch as hvd
            >>> hvd.init()
            >>> sampler = hvd.DistributedSampler(range(100), seed=7)
            >>> sampler.record(32)
            >>> sampler.state_dict()
            {'version': 1, 'epoch': 0, 'consumed': 32, 'length': 100, 'seed': 7, 'shuffle': True}
            >>> hvd.shutdown()
        """
        self._warn_of_unrecorded()
        length = len(self.dataset)
        is_over = max(self._segment.done) >= self._segment.share
        left = 0 if is_over else left_over(length, close(self._closed, self._segment))
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "consumed": length - left,
            "length": length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Distribute what was left of an epoch to the ranks of the present world.

        All ranks load the same state.

        Args:
            state_dict: what `state_dict` returned, in a world of any size.

        Raises:
            ArgumentError: it is not such a state, or the state is of other samples or of another
                order.
        """
        name = type(self).__name__
        _refuse_other_keys(name, state_dict, state_dict.keys() >= _KEYS)
        if state_dict["version"] != _VERSION:
            raise ArgumentError(
                f"{name}.load_state_dict: the state has version {state_dict['version']!r}, and "
                f"this hvdlite reads version {_VERSION}; load it with the hvdlite that wrote it"
            )
        own = {"length": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
        _refuse_other_order(name, state_dict, own)
        self.epoch = int(state_dict["epoch"])
        consumed = int(state_dict["consumed"])
        self._begin_epoch(((consumed,),) if consumed else ())

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank that are left."""
        done = self._segment.share > 0 and min(self._segment.done) == self._segment.share
        # Without `set_epoch`, the next iterator after the last index begins the same epoch anew.
        if self._ran_out or done:
            self._begin_epoch(())
        elif any(self._segment.done):
            self._begin_epoch(close(self._closed, self._segment))
        return self._give(self._own_indices(), self._segment)

    def _give(self, own: Sequence[int], segment: Segment) -> Iterator[int]:
        for given, index in enumerate(own, start=1):
            if segment is self._segment:
                self._drawn = max(self._drawn, given)
            yield index
        if segment is self._segment:
            self._ran_out = True

    def __len__(self) -> int:
        return self.num_samples

    def _begin_epoch(self, closed: tuple[Done, ...]) -> None:
        """Distribute what the closed segments have left of the epoch."""
        size, rank = self._fixed
        size = basics.size() if size is None else size
        self.rank = basics.rank() if rank is None else rank
        if not 0 <= self.rank < size:
            raise ArgumentError(
                f"{type(self).__name__}(num_replicas={size}, rank={self.rank}): the ranks are "
                f"0 to {size - 1}; leave both out to use those of hvdlite"
            )
        left = left_over(len(self.dataset), closed)
        samples = left - left % size if self.drop_last else left
        self._begin_segment(samples, range(size), closed)
        self._ran_out = False  # It says whether an iterator has come to its end.
        self._drawn = 0

    def _begin_segment(
        self, samples: int, workers: Sequence[int], closed: tuple[Done, ...]
    ) -> None:
        self._closed = closed
        self._segment = Segment(samples, workers)
        self.num_replicas, self.num_samples = len(workers), self._segment.share
        self.total_size = self.num_samples * self.num_replicas
        self.padded = self.total_size - samples

    def _own_indices(self) -> list[int]:
        order = self._make_order()
        left = remaining(order, self._closed)[: self._segment.samples]
        # The end of the epoch repeats its beginning, also when it was resumed in between.
        return take(left, self.num_replicas, self.rank, padding=order)

    def _make_order(self) -> list[int]:
        """Return the order of the epoch's samples: torch's."""
        length = len(self.dataset)
        if not self.shuffle:
            return list(range(length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(length, generator=generator, device="cpu").tolist()
        return order

    def _warn_of_unrecorded(self) -> None:
        if not self._drawn or self._ran_out or any(self._segment.done):
            return
        warnings.warn(
            f"state_dict() of a DistributedSampler that has given {self._drawn} samples of epoch "
            f"{self.epoch}, none of which was recorded: the epoch would begin anew; call "
            "sampler.record(len(batch)) after each step",
            UnrecordedSamplesWarning,
            stacklevel=3,
        )


class ElasticSampler(DistributedSampler):
    """Distributes the indices of a data set to the ranks, and what remains after each change.

    Give it to a `DataLoader` and to `hvd.elastic.TorchState`, so that what remains is distributed
    anew whenever the function under `hvd.elastic.run` is entered again. In your loop:

    1. Call `record_batch` for each batch, with the same sizes on all ranks. It may stand anywhere
       in the loop: a batch counts when its step is committed, for the ranks that made the step.
    2. Call `state.commit()` or `state.check_host_updates()` at the end of an epoch, too: if a rank
       died in the epoch, the rest of its samples is then distributed to the others.
    3. Call `set_epoch` after that, at the end of the epoch rather than at its beginning.

    Then every sample of an epoch is seen exactly once, except that each distribution repeats at
    most size()-1 samples so that all ranks get equally many (`padded`). A batch that was loaded
    ahead and not recorded comes again after a distribution. Without hvd.DistributedOptimizer nobody
    reports steps: a batch then counts when it is recorded, for the ranks of that moment.

    The order is the one of Horovod's ElasticSampler, for every seed and epoch, so its checkpoints
    can be loaded. Unlike `hvd.DistributedSampler`, `set_epoch` begins the epoch anew even if the
    sampler is in it already.

    Args:
        dataset: anything with a length, which stays the same; the same on all ranks.
        shuffle: whether each epoch has an order of its own.
        seed: decides these orders, together with the epoch; the same on all ranks.

    Attributes:
        epoch: the number of the epoch of the data set. The arguments are attributes, too.

    Raises:
        NotInitializedError: `init` was not called.

    Example:
        >>> import hvdlite.torch as hvd
        >>> from hvdlite.torch.elastic import ElasticSampler
        >>> hvd.init()
        >>> sampler = ElasticSampler(range(5), shuffle=False)
        >>> list(sampler)
        [0, 1, 2, 3, 4]
        >>> sampler.record_batch(0, 2)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 3, 4]
        >>> sampler.set_epoch(1)
        >>> len(sampler)
        5
        >>> hvd.shutdown()
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._excluded: frozenset[int] = frozenset()  # An older Horovod has recorded them.
        super().__init__(dataset, shuffle=shuffle, seed=seed)

    def _begin_epoch(self, closed: tuple[Done, ...]) -> None:
        now = epochs.current()
        self.rank = basics.rank() if now is None else now.rank
        workers = range(basics.size()) if now is None else now.workers
        samples = left_over(len(self.dataset) - len(self._excluded), closed)
        self._begin_segment(samples, workers, closed)
        self._loop_began = False
        self._checked = now  # This epoch was checked for joiners.

    # A loop calls these methods.

    def set_epoch(self, epoch: int) -> None:
        """Begin the epoch of the number `epoch`: no sample of it is done yet.

        Call it at the end of the one before. Warns of samples of a dead worker that nobody has
        seen.
        """
        self._segment.settle()
        self._warn_of_missed(epoch)
        self._warn_of_repeated(epoch)
        self.epoch = epoch
        self._excluded = frozenset()
        self._begin_epoch(())

    def record(self, samples: int) -> None:
        """Record that this rank has done, or is about to do, the next of its samples.

        Args:
            samples: how many, the same on all ranks; for the last batch it may be the size of a
                full one.

        Raises:
            ArgumentError: the number is negative.
        """
        samples = _checked_size(samples)
        now = epochs.current()
        if now is None:
            self._segment.count(samples)
        else:
            self._segment.record(samples, now.number)
            self._segment.settle()
            self._warn_of_joiners(now)

    def reset(self) -> None:
        """Distribute what remains of the epoch to the ranks of the present world.

        `hvd.elastic.TorchState` calls it. All ranks call it at the same place.
        """
        self._segment.settle()
        self._begin_epoch(close(self._closed, self._segment))

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank; the sampler distributes the same ones until `reset`."""
        self._segment.begin()
        self._loop_began = True
        return iter(take(self.remaining_indices, self.num_replicas, self.rank))

    # These methods save and restore the state.

    def state_dict(self) -> dict[str, Any]:
        """Return what another rank needs to distribute the same samples: a few integers.

        The state holds what all ranks have done, so the state of one rank is enough.

        Example:
            >>> import hvdlite.torch as hvd
            >>> hvd.init()
            >>> sampler = ElasticSampler(range(100))
            >>> sampler.record_batch(0, 32)
            >>> sampler.state_dict()["processed_num"], sampler.state_dict()["segments"]
            (32, [[32]])
            >>> hvd.shutdown()
        """
        self._segment.settle()
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "segments": [list(done) for done in close(self._closed, self._segment)],
            "samples": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        if self._excluded:
            state["processed_indices"] = sorted(self._excluded)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, and distribute what remains to the ranks of the present world.

        All ranks load the same state: that of rank 0, or that of a checkpoint.

        Args:
            state_dict: what `state_dict` returned, in a world of any size, or Horovod's, which has
                "epoch" and either "processed_num" or "processed_indices".

        Raises:
            ArgumentError: a key is missing, or the state is of other samples or of another order.
        """
        keys = state_dict.keys()
        done_keys = {"segments", "processed_num", "processed_indices"}
        _refuse_other_keys("ElasticSampler", state_dict, "epoch" in keys and bool(keys & done_keys))
        closed: tuple[Done, ...] = ()
        excluded = state_dict.get("processed_indices", ())
        if "segments" in keys:
            closed = tuple(tuple(map(int, done)) for done in state_dict["segments"])
            own = {"samples": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
            _refuse_other_order("ElasticSampler", state_dict, own if closed else {})
        elif "processed_num" in keys:
            done = int(state_dict["processed_num"])
            closed, excluded = ((done,),) if done > 0 else (), ()  # Both keys say the same.
        self.epoch = state_dict["epoch"]
        self._excluded = frozenset(map(int, excluded))
        self._begin_epoch(closed)

    # A script may read these properties.

    @property
    def processed_num(self) -> int:
        """How many samples of the epoch are done, by all ranks together."""
        self._segment.settle()
        return len(self.dataset) - left_over(self._segment.samples, [tuple(self._segment.done)])

    @property
    def processed_indices(self) -> set[int]:
        """The samples of the epoch that are done, by all ranks together."""
        self._segment.settle()
        left = remaining(self._make_order(), close(self._closed, self._segment))
        return set(range(len(self.dataset))).difference(left)

    @property
    def remaining_indices(self) -> list[int]:
        """What was distributed last, in order: what remained of the epoch then."""
        return remaining(self._make_order(), self._closed)

    # The methods below are internal.

    def _make_order(self) -> list[int]:
        """Return the order of the epoch's samples: Horovod's, without what it has recorded."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return [one for one in order if one not in self._excluded]

    def _warn_of_missed(self, epoch: int) -> None:
        now = epochs.current()
        recorded = any(self._segment.done)
        if now is None or now.rank != 0 or not (recorded or self._loop_began):
            return
        missed = self._segment.missed(self.rank, now.workers)
        if missed:
            count = f"{sum(missed.values())} samples"
            warnings.warn(
                f"ElasticSampler.set_epoch({epoch}): {count if recorded else f'up to {count}'} of "
                f"epoch {self.epoch} were distributed to workers that are gone, and no rank has "
                f"seen them: {_reasons(missed)}. Call state.commit() or state.check_host_updates() "
                "at the end of each epoch, before set_epoch(): such samples are then distributed "
                "to the ranks that are left",
                ElasticSamplerWarning,
                stacklevel=3,
            )

    def _warn_of_repeated(self, epoch: int) -> None:
        done = len(self.dataset) - self._segment.samples
        fresh = not any(self._segment.done) and self._segment.samples > 0
        now = epochs.current()
        speaks = (self.rank if now is None else now.rank) == 0
        if epoch == self.epoch and done > 0 and fresh and speaks:
            warnings.warn(
                f"ElasticSampler.set_epoch({epoch}): {done} samples of epoch {epoch} were done "
                "before training went on, and they will be seen again, because set_epoch() begins "
                "the epoch anew. Call set_epoch() at the end of an epoch, with the number of the "
                "next one",
                ElasticSamplerWarning,
                stacklevel=3,
            )

    def _warn_of_joiners(self, now: epochs.Epoch) -> None:
        if now == self._checked:
            return
        self._checked = now
        joined = sorted(set(now.workers).difference(self._segment.workers))
        if joined and now.rank == 0:
            warnings.warn(
                f"ElasticSampler: workers {joined} have joined since the samples of epoch "
                f"{self.epoch} were distributed, so ranks see the same samples twice. Give the "
                "sampler to hvd.elastic.TorchState, or call its reset() in a reset callback",
                ElasticSamplerWarning,
                stacklevel=3,
            )


def _refuse_other_keys(name: str, state: Mapping[str, Any], known: bool) -> None:
    if not known:
        raise ArgumentError(
            f"{name}.load_state_dict: the keys {sorted(state)} are not those of a sampler's state; "
            f"give what {name}.state_dict() returned"
        )


def _refuse_other_order(name: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        # Without "shuffle" the seed may differ.
        if key == "seed" and not own["shuffle"]:
            continue
        if state.get(key, value) != value:
            raise ArgumentError(
                f"{name}.load_state_dict: the state was made with {key}="
                f"{state[key]!r}, and this one has {key}={value!r}; which samples are done "
                "is known for one order only. Make both samplers alike, on all ranks"
            )


def _checked_size(samples: int) -> int:
    if samples < 0:
        raise ArgumentError(
            f"record({samples}): the number of samples in a batch cannot be negative; give the "
            "size of this rank's batch"
        )
    return int(samples)


def _reasons(gone: Collection[int]) -> str:
    """Say for each worker that is gone why the epoch after its last one began."""
    reasons: list[str] = []
    history = epochs.history()
    for before, after in pairwise(history):
        lost = set(before.workers).difference(after.workers).intersection(gone)
        if lost:
            reasons.append(f"workers {sorted(lost)} ({after.reason})")
    return ", ".join(reasons)


# It says how many samples each replica of a segment that is over has done.
Done = tuple[int, ...]


def remaining(order: Sequence[int], closed: Sequence[Done]) -> list[int]:
    """Return the samples that no replica of the closed segments has done, in their order."""
    left = list(order)
    for done in closed:
        replicas = len(done)
        # Before `low` everything is done, and from `high` on nothing.
        low, high = min(done) * replicas, max(done) * replicas
        between = enumerate(left[low:high], start=low)
        left = [one for j, one in between if j // replicas >= done[j % replicas]] + left[high:]
    return left


def left_over(samples: int, closed: Sequence[Done]) -> int:
    """Return how many of the samples `remaining` returns, without the order."""
    for done in closed:
        own = [len(range(replica, samples, len(done))) for replica in range(len(done))]
        samples -= sum(map(min, own, done))
    return samples


def take(
    left: Sequence[int], replicas: int, replica: int, padding: Sequence[int] | None = None
) -> list[int]:
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
    """What is distributed until the world changes, and what its replicas have done of it.

    What remains of the epoch's order, the same on all ranks, is distributed to n *replicas*, one
    for each worker of the world: replica s gets the positions s, s+n, s+2n, ... All get equally
    many, so some repeat a sample at the end: the *padding*, at most n-1 samples.

    A replica does its samples in order, so it is enough to know how many each has done. These
    numbers are the same on all ranks: in a step every rank of the step's world does equally many,
    so each rank also knows what the others did, even those that have died since. A *record* of a
    batch therefore counts for the replicas of the workers that made the batch's step.
    """

    # A record belongs to the last step, or to the next one, whose gradients may be under way:
    # scripts record a batch after `optimizer.step()`, before it, at the top of their loop, or after
    # each of several backward passes. Gradients under way mean the next step. So does a first
    # record that came before any gradient of the segment, and this then holds for the whole
    # segment. A record of the next step counts when the step is committed. If the segment is closed
    # first, it does not count. If the step is dropped and the script goes on, it counts with the
    # step after it.

    def __init__(self, samples: int, workers: Sequence[int]) -> None:
        self.samples = samples
        self.workers = tuple(workers)  # The worker of each replica, in the order of the ranks.
        self.done = [0] * len(self.workers)  # It counts each replica's samples, with the padding.
        self._ended = epochs.progress().ended
        self._before: bool | None = None  # It tells whether records come before their steps.
        self._records: list[_Record] = []  # These do not count yet.

    @property
    def share(self) -> int:
        """How many samples each replica gets, with the padding."""
        return -(-self.samples // len(self.workers))

    def begin(self) -> None:
        """Note that the loop over the samples begins after the steps that have ended now."""
        if self._before is None:
            self._ended = epochs.progress().ended

    def count(self, size: int, workers: Collection[int] | None = None) -> None:
        """Count samples as done by the replicas of these workers; None: by all replicas."""
        share = self.share
        chosen = None if workers is None or workers == self.workers else set(workers)
        for replica, worker in enumerate(self.workers):
            if chosen is None or worker in chosen:
                # A last batch is often recorded with the size of a full one.
                self.done[replica] = min(share, self.done[replica] + size)

    def record(self, size: int, epoch: int) -> None:
        """Note samples that this rank has done, or is about to do; `settle` counts them."""
        # If nobody reports steps, the samples count for the workers of the present `epoch`.
        progress = epochs.progress()
        if self._before is None:
            self._before = not progress.under_way and progress.ended == self._ended
        if progress.under_way or self._before:
            self._records.append(_Record(size, progress.committed + 1, epoch))
        else:
            self._records.append(_Record(size, 0, progress.epoch))

    def settle(self) -> None:
        """Count the records whose steps are committed; all of them if no steps are announced."""
        announced = epochs.progress().announced
        records, self._records = self._records, []
        for record in records:
            epoch = record.epoch
            if record.step and announced:
                epoch = epochs.epoch_of_step(record.step)
                if epoch is None:
                    self._records.append(record)
                    continue
            self.count(record.size, None if epoch is None else epochs.find(epoch).workers)

    def missed(self, replica: int, workers: Collection[int]) -> dict[int, int]:
        """Return how many samples each worker that is gone has stayed behind this rank."""
        # The padding does not count, and a worker that is not behind is left out. `workers` are
        # those of the present world.
        # A replica that has not done anything is taken to have done all.
        reached = self.done[replica] or self.share
        missed: dict[int, int] = {}
        for other, worker in enumerate(self.workers):
            own = len(range(other, self.samples, len(self.workers)))
            behind = min(reached, own) - self.done[other]
            if worker not in workers and behind > 0:
                missed[worker] = behind
        return missed
