"""A sampler that distributes an epoch anew when ranks come or go, and forgets no sample."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sized
from itertools import pairwise
from typing import Any

from hvdlite import basics
from hvdlite.elastic import epochs, steps
from hvdlite.elastic.sampling import Done, Segment, close, left_over, remaining, take
from hvdlite.errors import ElasticSamplerWarning
from hvdlite.torch.sampler import (
    DistributedSampler,
    checked,
    refuse_other_keys,
    refuse_other_order,
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

    Attributes:
        dataset: the data set, whose length stays the same.
        shuffle: whether each epoch has an order of its own.
        seed: decides these orders, together with the epoch.
        epoch: the number of the epoch of the data set.

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
        """Distribute the samples of epoch 0.

        Args:
            dataset: anything with a length; the same on all ranks.
            shuffle: whether to shuffle, each epoch in another way.
            seed: the same on all ranks.

        Raises:
            NotInitializedError: `init` was not called.
        """
        self._excluded: frozenset[int] = frozenset()  # An older Horovod has recorded them.
        self._order: list[int] | None = None  # This is the epoch's; it is made when it is needed.
        # This is the segment's; it is made when it is needed.
        self._distributed: list[int] | None = None
        super().__init__(dataset, shuffle=shuffle, seed=seed)

    def _begin_epoch(self, closed: tuple[Done, ...]) -> None:
        now = epochs.current()
        self._replica = basics.rank() if now is None else now.rank
        workers = tuple(range(basics.size())) if now is None else now.workers
        self._closed = closed
        samples = left_over(len(self.dataset) - len(self._excluded), closed)
        self._segment = Segment(samples, workers, steps.progress().ended)
        self._distributed = None
        self._loop_began = False
        self._checked = now  # This epoch was checked for joiners.

    # A loop calls these methods.

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample of it is done yet. Call it at the end of the one before.

        Warns of samples of a dead worker that nobody has seen.

        Args:
            epoch: the number of the new epoch.
        """
        self._settle()
        self._warn_of_missed(epoch)
        self._warn_of_repeated(epoch)
        self.epoch = epoch
        self._excluded, self._order = frozenset(), None
        self._begin_epoch(())

    def record(self, samples: int) -> None:
        """Record that this rank has done, or is about to do, the next of its samples.

        Args:
            samples: how many, the same on all ranks; for the last batch it may be the size of a
                full one.

        Raises:
            ArgumentError: the number is negative.
        """
        samples = checked(samples)
        now = epochs.current()
        if now is None:
            self._segment.count(samples)
        else:
            self._segment.record(samples, steps.progress(), now.number)
            self._settle()
            self._warn_of_joiners(now)

    def reset(self) -> None:
        """Distribute what remains of the epoch to the ranks of the present world.

        `hvd.elastic.TorchState` calls it. All ranks call it at the same place.
        """
        self._settle()
        self._begin_epoch(close(self._closed, self._segment))

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank; the sampler distributes the same ones until `reset`."""
        self._segment.begin(steps.progress().ended)
        self._loop_began = True
        return iter(take(self._indices(), self.num_replicas, self.rank))

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
        self._settle()
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
        closed = self._closed_in(state_dict)
        if closed and "segments" in state_dict:
            own = {"samples": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
            refuse_other_order("ElasticSampler", state_dict, own)
        excluded = state_dict.get("processed_indices", ())
        if "segments" not in state_dict and "processed_num" in state_dict:
            excluded = ()  # Both keys say the same.
        self.epoch = state_dict["epoch"]
        self._excluded, self._order = frozenset(map(int, excluded)), None
        self._begin_epoch(closed)

    def _closed_in(self, state: Mapping[str, Any]) -> tuple[Done, ...]:
        keys = state.keys()
        done_keys = {"segments", "processed_num", "processed_indices"}
        refuse_other_keys("ElasticSampler", state, "epoch" in keys and bool(keys & done_keys))
        if "segments" in keys:
            return tuple(tuple(map(int, done)) for done in state["segments"])
        done = int(state.get("processed_num", 0))
        return ((done,),) if done > 0 else ()

    # A script may read these properties.

    @property
    def processed_num(self) -> int:
        """How many samples of the epoch are done, by all ranks together."""
        self._settle()
        return len(self.dataset) - self._segment.samples + self._segment.processed

    @property
    def processed_indices(self) -> set[int]:
        """The samples of the epoch that are done, by all ranks together."""
        self._settle()
        left = remaining(self._full_order(), close(self._closed, self._segment))
        return set(range(len(self.dataset))).difference(left)

    @property
    def remaining_indices(self) -> list[int]:
        """What was distributed last, in order: what remained of the epoch then."""
        return list(self._indices())

    # The methods below are internal.

    def _make_order(self) -> list[int]:
        """Return the order of the epoch's samples: Horovod's."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def _full_order(self) -> list[int]:
        if self._order is None:
            order = self._make_order()
            if self._excluded:
                order = [one for one in order if one not in self._excluded]
            self._order = order
        return self._order

    def _indices(self) -> list[int]:
        if self._distributed is None:
            order = self._full_order()
            self._distributed = remaining(order, self._closed) if self._closed else order
        return self._distributed

    def _settle(self) -> None:
        self._segment.settle(steps.progress().announced, steps.epoch_of, _workers_in)

    def _warn_of_missed(self, epoch: int) -> None:
        now = epochs.current()
        recorded = any(self._segment.done)
        if now is None or now.rank != 0 or not (recorded or self._loop_began):
            return
        missed = self._segment.missed(self._replica, now.workers)
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
        speaks = (self._replica if now is None else now.rank) == 0
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


def _workers_in(epoch: int) -> tuple[int, ...]:
    return epochs.find(epoch).workers


def _reasons(gone: Collection[int]) -> str:
    """Say for each worker that is gone why the epoch after its last one began."""
    reasons: list[str] = []
    history = epochs.history()
    for before, after in pairwise(history):
        lost = set(before.workers).difference(after.workers).intersection(gone)
        if lost:
            reasons.append(f"workers {sorted(lost)} ({after.reason})")
    return ", ".join(reasons)
