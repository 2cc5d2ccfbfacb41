"""Automatic names of collectives that the user did not name.

The coordinator matches the ranks' collectives by name. So operations without a name are counted for
each process set and kind of operation: the third unnamed allreduce of one member of a process set
meets the third of every other member, whatever else ran in between. Every `init` restarts the
counts, since a new world begins. The end of `join` restarts them too, because the joined ranks have
missed operations; only the numbers of `next_object` continue.
"""

from __future__ import annotations

import itertools

_counts: dict[tuple[int, str], itertools.count[int]] = {}
_objects: dict[tuple[int, str], itertools.count[int]] = {}
_restarts = 0


def next_name(kind: str, process_set: int = 0) -> str:
    """Return the next name for this kind of operation.

    The names start with '#'. The core does not cache such names, because each is used once.

    Example:
        >>> restart()
        >>> next_name("allreduce"), next_name("broadcast"), next_name("allreduce")
        ('#allreduce.0', '#broadcast.0', '#allreduce.1')
        >>> next_name("allreduce", process_set=1)
        '#allreduce.0'
    """
    return f"#{kind}.{next_number(kind, process_set)}"


def next_number(kind: str, process_set: int = 0) -> int:
    """Return how many operations of this kind the process set has numbered before."""
    return next(_counts.setdefault((process_set, kind), itertools.count()))


def forget(process_set: int) -> None:
    """Drop the counts of a process set that was removed."""
    for counts in (_counts, _objects):
        for key in [key for key in counts if key[0] == process_set]:
            del counts[key]


def next_object(kind: str, process_set: int = 0) -> int:
    """Return how many objects of this kind (optimizers, metrics) the process set has numbered.

    An object keeps its number, and names all of its operations by it. So these numbers continue
    after `join`.
    """
    return next(_objects.setdefault((process_set, kind), itertools.count()))


def restart() -> None:
    """Count everything from zero again, because a new world begins."""
    restart_operations()
    _objects.clear()


def restart_operations() -> None:
    """Count operations from zero again, so that ranks that missed some have equal counts."""
    global _restarts
    _restarts += 1
    _counts.clear()


def restarts() -> int:
    """Return how often the counts of operations were restarted.

    A caller that remembers what the ranks agreed on compares this number: after a restart they must
    agree again.
    """
    return _restarts
