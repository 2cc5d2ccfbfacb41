"""A distributed sampler that resumes within an epoch, also with another number of ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch

from hvdlite.elastic.sampling import Done, close
from hvdlite.elastic.sharding import ShardedData
from hvdlite.errors import UnrecordedSamplesWarning


class DistributedSampler(ShardedData, torch.utils.data.DistributedSampler):  # type: ignore[misc]
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

    torchdata's `StatefulDataLoader` saves and loads this sampler; then leave out
    `record`. In an elastic job use `hvd.elastic.ElasticSampler`.

    Attributes:
        dataset: the data set, whose length stays the same.
        shuffle: whether each epoch has an order of its own.
        seed: decides these orders, together with the epoch.
        drop_last: whether samples that cannot be distributed evenly are left out, instead of
            repeated.
        epoch: the number of the epoch.

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

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Deal the samples of epoch 0.

        Args:
            dataset: anything with a length; the same on all ranks.
            num_replicas: among how many ranks; by default `hvd.size()`.
            rank: which of them this is; by default `hvd.rank()`.
            shuffle: whether to shuffle, each epoch in another way.
            seed: the same on all ranks.
            drop_last: leave out the samples that cannot be distributed evenly, instead of repeating
                some.

        Raises:
            ArgumentError: there is no such rank.
            NotInitializedError: a number was left to hvdlite, and `init` was not called.
        """
        self.dataset = dataset
        self._asked = 0  # The last set_epoch() set this epoch.
        self._start(shuffle, seed, drop_last, num_replicas, rank)

    def _length(self) -> int:
        return len(self.dataset)

    def _begin_epoch(self, closed: tuple[Done, ...]) -> None:
        super()._begin_epoch(closed)
        self._ran_out = False  # It says whether an iterator has come to its end.
        self._drawn = 0  # No iterator of this segment has given more indices.

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless the sampler is in it already.

        Args:
            epoch: its number.
        """
        self._asked = epoch
        super().set_epoch(epoch)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Do what `record` does, with the arguments of Horovod's ElasticSampler.

        Args:
            batch_idx: not used; batches are recorded in order.
            batch_size: how many samples; see `record`.
        """
        self.record(batch_size)

    def _before_state(self) -> None:
        """Warn in the middle of an epoch of which nothing was recorded."""
        if not self._drawn or self._ran_out or any(self._segment.done):
            return
        # torchdata's StatefulDataLoader asks the iterator as well, which has its own position.
        if sys._getframe(2).f_globals.get("__name__", "").startswith("torchdata."):
            return
        warnings.warn(
            f"state_dict() of a DistributedSampler that has given {self._drawn} samples of epoch "
            f"{self.epoch}, none of which was recorded: the epoch would begin anew; call "
            "sampler.record(len(batch)) after each step",
            UnrecordedSamplesWarning,
            stacklevel=3,
        )

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank that are left, in an iterator that has a state."""
        done = self._segment.share > 0 and min(self._segment.done) == self._segment.share
        # Without `set_epoch`, the next iterator after the last index begins the same epoch anew.
        if self._ran_out or done:
            self.epoch = max(self.epoch, self._asked)
            self._begin_epoch(())
        elif any(self._segment.done):
            self._begin_epoch(close(self._closed, self._segment))
        return _Indices(self)

    def __len__(self) -> int:
        return self.num_samples

    def _make_order(self) -> list[int]:
        """Return the order of the epoch's samples: torch's."""
        length = len(self.dataset)
        if not self.shuffle:
            return list(range(length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(length, generator=generator, device="cpu").tolist()
        return order


class _Indices(Iterator[int]):
    """The indices of one rank; `StatefulDataLoader` saves and loads its position."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._segment = self._sampler._segment
        self._own = self._sampler._own(self._sampler._make_order())
        self._given = 0

    def __next__(self) -> int:
        if self._given == len(self._own):
            if self._segment is self._sampler._segment:
                self._sampler._ran_out = True
            raise StopIteration
        self._given += 1
        if self._segment is self._sampler._segment:
            self._sampler._drawn = max(self._sampler._drawn, self._given)
        return self._own[self._given - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state when what this iterator has given is done."""
        return self._sampler._state_after(self._given)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a position. After the end of an epoch the next iterator begins another one."""
        self._sampler.load_state_dict(state_dict)
        self._sampler._ran_out = state_dict["consumed"] >= state_dict["length"]
        self._begin()
