"""Automatic names of collectives that the user did not name.

The coordinator matches the ranks' collectives by name. So operations without a name are counted for
each process set and kind of operation: the third unnamed allreduce of one member of a process set
meets the third of every other member, whatever else ran in between. Every `init` restarts the
counts, since a new world begins. The end of `join` restarts them too, because the joined ranks have
missed operations; only the numbers of `next_object` continue.

In an elastic job a rank that joins has run the script up to `hvd.elastic.run`, and no further. So
all ranks go back to the counts that they had there (`mark`, `back_to`) whenever ranks may join.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

_Counts = dict[tuple[int, str], int]

_counts: _Counts = {}
_objects: _Counts = {}
_restarts = 0
_lock = threading.Lock()  # It guards all of these.


@dataclass(frozen=True)
class Mark:
    """The counts at one point of the script."""

    counts: Mapping[tuple[int, str], int]
    objects: Mapping[tuple[int, str], int]


def next_name(kind: str, process_set: int = 0) -> str:
    """Return the next name for this kind of operation, such as "#allreduce.0"."""
    # The core does not cache names that start with '#', because each is used once.
    return f"#{kind}.{next_number(kind, process_set)}"


def next_number(kind: str, process_set: int = 0) -> int:
    """Return how many operations of this kind the process set has numbered before."""
    return _next(_counts, process_set, kind)


def _next(counts: _Counts, process_set: int, kind: str) -> int:
    with _lock:
        number = counts.get((process_set, kind), 0)
        counts[process_set, kind] = number + 1
    return number


def forget(process_set: int) -> None:
    """Drop the counts of a process set that was removed."""
    with _lock:
        for counts in (_counts, _objects):
            for key in [key for key in counts if key[0] == process_set]:
                del counts[key]


def next_object(kind: str, process_set: int = 0) -> int:
    """Return how many objects of this kind (optimizers, metrics) the process set has numbered."""
    # An object keeps its number, and names all of its operations by it. So these numbers continue
    # after `join`.
    return _next(_objects, process_set, kind)


def restart() -> None:
    """Count everything from zero again, because a new world begins."""
    back_to(Mark({}, {}))


def restart_operations() -> None:
    """Count operations from zero again, so that ranks that missed some have equal counts."""
    global _restarts
    with _lock:
        _restarts += 1
        _counts.clear()


def mark() -> Mark:
    """Return the present counts, for `back_to`."""
    with _lock:
        return Mark(dict(_counts), dict(_objects))


def back_to(here: Mark) -> None:
    """Go on counting from a mark, so that ranks that did not come further have equal counts."""
    global _restarts
    with _lock:
        _restarts += 1
        for counts, marked in ((_counts, here.counts), (_objects, here.objects)):
            counts.clear()
            counts.update(marked)


def restarts() -> int:
    """Return how often the counts restarted: after each restart the ranks must agree again."""
    return _restarts
