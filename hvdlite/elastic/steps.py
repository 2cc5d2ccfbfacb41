"""The optimizer's steps that this worker has made, each with the epoch whose ranks made it.

In an elastic job the reducer of gradients calls `announced`, `begun`, `committed` and `dropped`,
in the training thread or in autograd's. A sampler asks `progress` and `epoch_of`, because a batch
counts for the ranks that made the batch's step. Steps are counted from 1 over the life of the
process, all optimizers together. Outside elastic jobs nothing calls this module.

Example:
    >>> forget()
    >>> begun()
    >>> progress().under_way, progress().committed
    (True, 0)
    >>> committed(epoch=3)
    >>> progress().under_way, progress().committed, epoch_of(1)
    (False, 1, 3)
    >>> forget()
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, replace

from hvdlite.elastic import epochs


@dataclass(frozen=True)
class Progress:
    """How far the steps of this process are."""

    announced: bool = False  # The steps of this process are reported at all.
    committed: int = 0  # So many steps were committed; it is the number of the last one.
    ended: int = 0  # So many steps were committed or dropped.
    under_way: bool = False  # Gradients of the next step are under way.
    epoch: int | None = None  # The last step that ended was in it; None before the first one.


_lock = threading.Lock()
# Both are under _lock. A new list item begins where steps are committed in another epoch. As many
# items are kept as `epochs` keeps epochs, and one more, which all steps before belong to: samplers
# ask for the newest steps, and `epochs.find` refuses the epoch of that item.
_progress = Progress()
_epochs: list[tuple[int, int]] = []  # An item is (number of the first step, epoch).


def announced() -> None:
    """Note that steps will be reported, so that samples count when their step is committed."""
    # The reducer calls this function when it is made. Without the call, a batch that is recorded
    # before the first gradient of the process counts at once, as in a script whose steps nobody
    # reports.
    global _progress
    with _lock:
        _progress = replace(_progress, announced=True)


def begun() -> None:
    """Note that gradients of a step are under way; further calls in this step do nothing."""
    global _progress
    with _lock:
        if not _progress.under_way:
            _progress = replace(_progress, announced=True, under_way=True)


def committed(epoch: int) -> None:
    """Note that the gradients of a step were reduced over the ranks of `epoch`, and handed out."""
    global _progress
    with _lock:
        number = _progress.committed + 1
        if not _epochs or _epochs[-1][1] != epoch:
            _epochs.append((number, epoch))
            if len(_epochs) > epochs.MOST_KEPT + 1:
                del _epochs[0]
                _epochs[0] = (1, _epochs[0][1])
        _progress = Progress(
            announced=True, committed=number, ended=_progress.ended + 1, epoch=epoch
        )


def dropped() -> None:
    """Note that the gradients under way, if there are any, will not make a step."""
    # The function that trains has ended, its backward has raised, or the gradients were zeroed.
    global _progress
    now = epochs.current()
    with _lock:
        if _progress.under_way:
            _progress = replace(
                _progress,
                ended=_progress.ended + 1,
                under_way=False,
                epoch=None if now is None else now.number,
            )


def progress() -> Progress:
    """Return how far the steps are, all of it at one moment."""
    with _lock:
        return _progress


def epoch_of(step: int) -> int | None:
    """Return the epoch whose ranks made this step, from 1; None if the step is not committed."""
    # For a step of long ago, it is an epoch that `epochs.find` does not know any more.
    with _lock:
        if not 1 <= step <= _progress.committed:
            return None
        return _epochs[bisect_right(_epochs, step, key=lambda item: item[0]) - 1][1]


def forget() -> None:
    """Forget all steps, as in a process that has just started."""
    global _progress
    with _lock:
        _progress = Progress()
        _epochs.clear()
