"""The two phases of reducers with PowerSGD: left factors first, then all else; see `low_rank`.

A reducer goes on to its second phase when the left factors have arrived. Another rank may be in
that phase of another reducer. So all reducers of a thread whose left factors are in flight go on
while one of them waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

from hvdlite.errors import HvdliteError
from hvdlite.torch.exchange.gradient_bucket import GradientBucket

_PAUSE = 1e-4  # seconds between two looks at several reducers

_all: weakref.WeakSet[Phases] = weakref.WeakSet()


def in_use() -> bool:
    """Return whether some reducer has phases."""
    return bool(_all)


class Phases:
    """The phases of one reducer's cycles. Not thread-safe.

    Attributes:
        buckets: those of the reducer.
    """

    def __init__(self, failed: Callable[[GradientBucket, HvdliteError], None]) -> None:
        """Begin without buckets.

        Args:
            failed: called with the error of a bucket that could not advance; it must not keep the
                owner of this object alive.
        """
        self.buckets: Sequence[GradientBucket] = ()
        self._failed = failed
        self._thread = threading.get_ident()
        _all.add(self)

    @property
    def leads(self) -> bool:
        """Whether left factors are in flight."""
        return any(bucket.leads for bucket in self.buckets)

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
        for bucket in self.buckets:
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
