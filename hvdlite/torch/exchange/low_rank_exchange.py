"""The exchange of PowerSGD has two phases: left factors first, then all else; see `low_rank`.

An exchange goes on to its second phase when the left factors have arrived. Another rank may be in
that phase of another reducer. So all exchanges of a thread whose left factors are in flight go on
while one of them waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.compression import NoneCompressor
from hvdlite.errors import HvdliteError
from hvdlite.torch.exchange.bucket import Bucket
from hvdlite.torch.exchange.gradient_bucket import GradientBucket
from hvdlite.torch.exchange.gradient_exchange import GradientExchange
from hvdlite.torch.exchange.layout import digest
from hvdlite.torch.exchange.low_rank import LowRank, Schedule
from hvdlite.torch.exchange.low_rank_bucket import LowRankBucket
from hvdlite.torch.exchange.settings import Settings

_PAUSE = 1e-4  # Two looks at several exchanges are so many seconds apart.

_all: weakref.WeakSet[LowRankExchange] = weakref.WeakSet()


class LowRankExchange(GradientExchange):
    """Compresses the gradients of matrices; the other ones travel as they are."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        failed: Callable[[GradientBucket, HvdliteError], None],
    ) -> None:
        """Make it; `failed` gets the error of a bucket that could not advance."""
        super().__init__(name, settings)
        self.compression = repr(settings.compression)
        self._compressor = NoneCompressor
        self._schedule = Schedule(settings.compression, settings.reduction.process_set)
        # It must not keep the reducer alive.
        self._failed = failed
        self._thread = threading.get_ident()
        self._buckets: list[LowRankBucket] = []  # Gradients of these may be compressed.
        _all.add(self)

    def make_buckets(
        self, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> Sequence[GradientBucket]:
        """Make the buckets, without errors of earlier steps."""
        self._buckets = []
        return super().make_buckets(params, names)

    def _digest(self, named: list[list[str]]) -> int:
        return digest([*named, [self.compression]])

    def _bucket(self, name: str, params: Sequence[torch.Tensor], *arguments: Any) -> GradientBucket:
        low_rank = LowRank(params, self._schedule)
        if not low_rank:
            return Bucket(name, params, *arguments)
        bucket = LowRankBucket(low_rank, name, params, *arguments)
        self._buckets.append(bucket)
        return bucket

    def begin_anew(self) -> None:
        """Agree with the other ranks again when to compress."""
        self._schedule.begin_anew()

    @property
    def leads(self) -> bool:
        """Whether left factors are in flight."""
        return any(bucket.leads for bucket in self._buckets)

    def advance(self) -> None:
        """Submit what follows the left factors, when these have arrived."""
        together = [one for one in _all if one._thread == self._thread and one.leads]
        while self.leads:
            moved = [one._advance_buckets(wait=len(together) == 1) for one in together]
            if not any(moved):
                time.sleep(_PAUSE)

    def _advance_buckets(self, wait: bool) -> bool:
        """Advance buckets in their order, as far as `wait` allows; return whether one did."""
        moved = False
        for bucket in self._buckets:
            if not bucket.leads:
                continue
            if not wait and not bucket.arrived:
                break
            moved = True
            try:
                bucket.advance()
            except HvdliteError as error:
                self._failed(bucket, error)
        return moved

    def finish(self, used: bool, counts: bool) -> None:
        """Keep the errors and bases of the cycle if it is used and all results are finite."""
        own = [bucket.low_rank for bucket in self._buckets]
        # GradScaler skips a step in which gradients have overflowed.
        keep = used and all(one.finite() for one in own)
        with torch.no_grad():
            for one in own:
                one.settle(keep, counts)

    def abandon(self) -> None:
        """Wait for the left factors, without using them."""
        for bucket in self._buckets:
            bucket.abandon()

    def forget(self) -> None:
        """Forget the errors of earlier steps."""
        for bucket in self._buckets:
            bucket.low_rank.forget()
