"""The worlds that this worker of an elastic job has been a member of, in turn.

The membership thread records an epoch before the engine of that epoch hands anything out. Any
thread may read. Outside elastic jobs nothing is recorded.

Example:
    >>> forget()
    >>> record(Epoch(0, workers=(0, 1, 2), worker=2, reason="start"))
    >>> record(Epoch(1, workers=(0, 2), worker=2, reason="worker 1 died of SIGKILL"))
    >>> current().rank, current().size
    (1, 2)
    >>> find(0).workers
    (0, 1, 2)
    >>> forget()
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hvdlite.errors import ArgumentError

_MOST_NAMED = 10  # An error names at most so many epochs.
MOST_KEPT = 1000  # A job that runs for months must not grow by its epochs.


@dataclass(frozen=True, slots=True)
class Epoch:
    """One world of an elastic job, as this worker sees it.

    Attributes:
        number: the registrar's number of the epoch, from 0.
        workers: the workers in the order of their ranks. A worker's number is never used again.
        worker: the number of this process.
        reason: why the epoch began, in words.

    Example:
        >>> Epoch(1, workers=(0, 2, 3), worker=2, reason="worker 1 died of SIGKILL").rank
        1
    """

    number: int
    workers: tuple[int, ...]
    worker: int
    reason: str

    @property
    def rank(self) -> int:
        """This process's rank in the epoch's world."""
        return self.workers.index(self.worker)

    @property
    def size(self) -> int:
        """How many ranks the epoch's world has."""
        return len(self.workers)


_lock = threading.Lock()
_history: list[Epoch] = []  # `_lock` guards it.


def record(epoch: Epoch) -> None:
    """Add the epoch that begins now."""
    with _lock:
        _history.append(epoch)
        del _history[:-MOST_KEPT]


def history() -> list[Epoch]:
    """Return the newest 1,000 epochs that this worker was a member of, the newest one last.

    Example:
        >>> for epoch in hvd.elastic.history():
        ...     print(f"epoch {epoch.number}: rank {epoch.rank} of {epoch.size}, {epoch.reason}")
    """
    with _lock:
        return list(_history)


def current() -> Epoch | None:
    """Return the newest epoch; None outside elastic jobs, and in a joiner before its first one."""
    with _lock:
        return _history[-1] if _history else None


def find(number: int) -> Epoch:
    """Return the epoch with this number; raise ArgumentError if this worker does not know it."""
    # The worker was not a member of such an epoch, or the epoch was long ago.
    with _lock:
        for epoch in reversed(_history):
            if epoch.number == number:
                return epoch
        newest = [epoch.number for epoch in _history][-_MOST_NAMED:]
    raise ArgumentError(
        f"this worker was not a member of epoch {number}; it was last a member of the epochs "
        f"{newest}"
    )


def forget() -> None:
    """Forget all epochs, as in a process that has just started."""
    with _lock:
        _history.clear()
