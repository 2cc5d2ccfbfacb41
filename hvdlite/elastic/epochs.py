"""The worlds that this process has belonged to, one after the other: the epochs of an elastic job.

Example:
    >>> record(Epoch(0, workers=(0, 1), worker=1, reason="start"))
    >>> current().rank, current().size
    (1, 2)
    >>> forget()
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.errors import ArgumentError


@dataclass(frozen=True)
class Epoch:
    """One world of an elastic job.

    Attributes:
        number: counts the worlds of the job.
        workers: the members, in the order of their ranks; a worker's number is never used again.
        worker: the number of this process.
        reason: why the world was formed.
    """

    number: int
    workers: tuple[int, ...]
    worker: int
    reason: str

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.workers.index(self.worker)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.workers)


_epochs: list[Epoch] = []


def record(epoch: Epoch) -> None:
    """Note that a world was formed."""
    _epochs.append(epoch)


def history() -> list[Epoch]:
    """Return all epochs of this process, the present one last."""
    return list(_epochs)


def current() -> Epoch | None:
    """Return the present epoch; None outside elastic jobs."""
    return _epochs[-1] if _epochs else None


def find(number: int) -> Epoch:
    """Return the epoch of that number.

    Raises:
        ArgumentError: this process was not in it.
    """
    for epoch in _epochs:
        if epoch.number == number:
            return epoch
    raise ArgumentError(f"this process was not in epoch {number}")


def forget() -> None:
    """Forget all epochs."""
    _epochs.clear()
