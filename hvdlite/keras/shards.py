"""Arrays distributed to the ranks of `model.fit`, which resumes in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite.elastic.sampling import Done
from hvdlite.elastic.sharding import ShardedData
from hvdlite.errors import ArgumentError, HvdliteError


class Shards(ShardedData, keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's batches of some arrays, the same number on every rank; for Keras 3.

    Give it to `fit` with `shuffle=False` (it shuffles itself, on all ranks alike), and with
    `hvd.callbacks.RecordCallback(shards)`. Put `state_dict()` into the checkpoint: it is the same
    on all ranks. After `load_state_dict` the shards are what was left of the epoch. With the same
    number of ranks these are exactly the batches that the stopped job would have had. With another
    number each sample that is left comes once, and only the end of the epoch is padded.

    `fit` fixes its number of batches when it begins, so what is left of an epoch needs a `fit` of
    its own.

    Attributes:
        shuffle: whether each epoch has an order of its own.
        seed: decides these orders, together with the epoch.
        drop_last: whether samples that cannot be distributed evenly are left out, instead of
            repeated.
        epoch: the number of the epoch.
        batch_size: the number of samples in each batch of a rank, but for the last one.

    Example:
        >>> import numpy as np
        >>> import hvdlite.keras as hvd
        >>> hvd.init()
        >>> shards = hvd.Shards(np.arange(6), batch_size=2, shuffle=False)
        >>> shards.record(4)
        >>> shards.load_state_dict(shards.state_dict())
        >>> len(shards), shards[0]
        (1, (array([4, 5]),))
        >>> hvd.shutdown()
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Distribute the samples of epoch 0.

        Args:
            x: an array with a row for each sample, or a list, tuple or dict of such arrays; all
                samples, the same on all ranks.
            y: the targets, likewise; None if there are none.
            batch_size: how many samples a rank's batch has.
            shuffle: whether to shuffle, each epoch in another way.
            seed: the same on all ranks.
            drop_last: leave out the samples that cannot be distributed evenly, instead of repeating
                some.

        Raises:
            ArgumentError: arrays have different numbers of rows, or the batch size is not at
                least 1.
            NotInitializedError: `init` was not called.
        """
        super().__init__()
        self._arrays = (x,) if y is None else (x, y)
        lengths = {len(array) for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1 or batch_size < 1:
            raise ArgumentError(
                f"Shards(batch_size={batch_size}): the arrays have {sorted(lengths)} rows; give "
                "arrays with one row for each sample, and batches of at least one sample"
            )
        self._rows = lengths.pop()
        self.batch_size = batch_size
        # Each batch of this fit() was loaded last for this epoch.
        self._loaded: dict[int, int] = {}
        self._start(shuffle, seed, drop_last)

    def _length(self) -> int:
        return self._rows

    def _begin_epoch(self, closed: tuple[Done, ...]) -> None:
        super()._begin_epoch(closed)
        order = np.arange(self._rows)
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        self._distributed = np.array(self._own(order.tolist()), dtype=np.int64)

    def begin_fit(self) -> None:
        """Expect the batches in their order, from the first one on; for `RecordCallback`."""
        self._loaded.clear()

    def begin_pass(self, epoch: int) -> None:
        """Begin an epoch, or begin anew what was left of it; for `RecordCallback`."""
        if epoch == self.epoch:
            self._begin_epoch(self._closed)
        else:
            self.set_epoch(epoch)

    def record_batches(self, done: int, batches: int) -> None:
        """Record the batches from `done` to `batches` of this pass; for `RecordCallback`."""
        for batch in range(done, batches):
            # No batch may be loaded before its epoch has begun.
            loaded = self._loaded.get(batch, self.epoch)
            if loaded != self.epoch:
                raise HvdliteError(
                    f"rank {self.rank}: fit() has loaded batch {batch} of epoch {self.epoch} in "
                    f"epoch {loaded}, whose samples it has; call fit() without steps_per_epoch, or "
                    "once for each epoch"
                )
        self.record((batches - done) * self.batch_size)

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return a batch; raise if batches are asked for in another order than their own."""
        if index > 0 and index - 1 not in self._loaded:
            raise ArgumentError(
                f"Shards: batch {index} was asked for before batch {index - 1}, and what is done "
                "is known for one order only; give fit() shuffle=False (Shards shuffles itself)"
            )
        self._loaded[index] = self.epoch
        rows = self._distributed[index * self.batch_size : (index + 1) * self.batch_size]
        batch: tuple[Any, ...] = keras.tree.map_structure(lambda one: one[rows], self._arrays)
        return batch
