"""Names for collectives that the user did not name: numbered per kind, so that ranks match.

Ranks meet in a collective by its name. Calls without one are counted per process set and kind of
operation: the third unnamed allreduce of one rank in a set meets the third of every other member,
whatever else ran in between. `init` restarts the count, so that ranks that join later start level
with the others. So does the end of `join`, since some ranks have missed operations by then;
`next_object` goes on.
"""

from __future__ import annotations

import itertools

_counts: dict[tuple[int, str], itertools.count[int]] = {}
_objects: dict[tuple[int, str], itertools.count[int]] = {}
_restarts = 0


def next_name(kind: str, process_set: int = 0) -> str:
    """Return the next name of that kind; the core does not cache names that start with '#'.

    Example:
        >>> restart()
        >>> next_name("allreduce"), next_name("broadcast"), next_name("allreduce")
        ('#allreduce.0', '#broadcast.0', '#allreduce.1')
        >>> next_name("allreduce", process_set=1)
        '#allreduce.0'
    """
    return f"#{kind}.{next_number(kind, process_set)}"


def next_number(kind: str, process_set: int = 0) -> int:
    """Return how many of that kind were numbered before in that set."""
    return next(_counts.setdefault((process_set, kind), itertools.count()))


def forget(process_set: int) -> None:
    """Drop the counts of a set that was removed."""
    for counts in (_counts, _objects):
        for key in [key for key in counts if key[0] == process_set]:
            del counts[key]


def next_object(kind: str, process_set: int = 0) -> int:
    """Return how many objects of that kind were made before in that set.

    Objects name their operations for long, so that their numbers stay when ranks have joined.
    """
    return next(_objects.setdefault((process_set, kind), itertools.count()))


def restart() -> None:
    """Count everything from zero again: a new world begins."""
    restart_operations()
    _objects.clear()


def restart_operations() -> None:
    """Count operations from zero again: ranks that missed some are level with the others then."""
    global _restarts
    _restarts += 1
    _counts.clear()


def restarts() -> int:
    """Return how often operations were counted from zero again: what ranks learnt is stale then."""
    return _restarts
