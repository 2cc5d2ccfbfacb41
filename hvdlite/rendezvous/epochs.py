"""The worlds that this worker of an elastic job has been a member of, and its optimizer's steps.

The membership thread records an epoch before the engine of that epoch hands anything out. In an
elastic job the reducer of gradients tells when a step begins and ends, in the training thread or in
autograd's; a sampler asks `progress` and `epoch_of_step`, because a batch counts for the ranks that
made the batch's step. Steps are counted from 1 over the life of the process, all optimizers
together. Any thread may read. Outside elastic jobs nothing is recorded.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Progress:
    """How far the steps of this process are."""

    announced: bool = False  # The steps of this process are reported at all.
    committed: int = 0  # So many steps were committed; it is the number of the last one.
    ended: int = 0  # So many steps were committed or dropped.
    under_way: bool = False  # Gradients of the next step are under way.
    epoch: int | None = None  # The last step that ended was in it; None before the first one.


_lock = threading.Lock()  # It guards the rest.
_history: list[Epoch] = []
_progress = Progress()
# An item is (number of the first step, epoch); a new one begins where steps are committed in
# another epoch. As many are kept as there are epochs, and one more, which all steps before belong
# to: samplers ask for the newest steps, and `find` refuses the epoch of that item.
_steps: list[tuple[int, int]] = []


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
    """Return the epoch with this number.

    Raises:
        ArgumentError: this worker was not a member of it, or it was long ago.
    """
    with _lock:
        for epoch in reversed(_history):
            if epoch.number == number:
                return epoch
        newest = [epoch.number for epoch in _history][-_MOST_NAMED:]
    raise ArgumentError(
        f"this worker was not a member of epoch {number}; it was last a member of the epochs "
        f"{newest}"
    )


def announce_steps() -> None:
    """Note that steps will be reported, so that samples count when their step is committed."""
    # The reducer calls this function when it is made. Without the call, a batch that is recorded
    # before the first gradient of the process counts at once, as in a script whose steps nobody
    # reports.
    global _progress
    with _lock:
        _progress = replace(_progress, announced=True)


def begin_step() -> None:
    """Note that gradients of a step are under way; further calls in this step do nothing."""
    global _progress
    with _lock:
        if not _progress.under_way:
            _progress = replace(_progress, announced=True, under_way=True)


def commit_step(epoch: int) -> None:
    """Note that the gradients of a step were reduced over the ranks of `epoch`, and handed out."""
    global _progress
    with _lock:
        number = _progress.committed + 1
        if not _steps or _steps[-1][1] != epoch:
            _steps.append((number, epoch))
            if len(_steps) > MOST_KEPT + 1:
                del _steps[0]
                _steps[0] = (1, _steps[0][1])
        _progress = Progress(
            announced=True, committed=number, ended=_progress.ended + 1, epoch=epoch
        )


def drop_step() -> None:
    """Note that the gradients under way, if there are any, will not make a step."""
    # The function that trains has ended, its backward has raised, or the gradients were zeroed.
    global _progress
    with _lock:
        if _progress.under_way:
            _progress = replace(
                _progress,
                ended=_progress.ended + 1,
                under_way=False,
                epoch=_history[-1].number if _history else None,
            )


def progress() -> Progress:
    """Return how far the steps are, all of it at one moment."""
    with _lock:
        return _progress


def epoch_of_step(step: int) -> int | None:
    """Return the epoch whose ranks made this step, from 1; None if the step is not committed."""
    # For a step of long ago, it is an epoch that `find` does not know any more.
    with _lock:
        if not 1 <= step <= _progress.committed:
            return None
        return _steps[bisect_right(_steps, step, key=lambda item: item[0]) - 1][1]
