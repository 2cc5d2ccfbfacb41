"""Names for collectives that the user did not name: numbered per kind, so that ranks match.

Ranks meet in a collective by its name. Calls without one are counted per kind of operation: the
third unnamed allreduce of one rank meets the third of every other, whatever else ran in between.
`init` restarts the count, so that ranks that join later start level with the others. So does the
end of `join`, since some ranks have missed operations by then; `next_object` goes on.
"""

from __future__ import annotations

import itertools

_counts: dict[str, itertools.count[int]] = {}
_objects: dict[str, itertools.count[int]] = {}
_restarts = 0


def next_name(kind: str) -> str:
    """Return the next name of that kind; the core does not cache names that start with '#'.

    Example:
        >>> restart()
        >>> next_name("allreduce"), next_name("broadcast"), next_name("allreduce")
        ('#allreduce.0', '#broadcast.0', '#allreduce.1')
    """
    return f"#{kind}.{next_number(kind)}"


def next_number(kind: str) -> int:
    """Return how many of that kind were numbered before."""
    return next(_counts.setdefault(kind, itertools.count()))


def next_object(kind: str) -> int:
    """Return how many objects of that kind, which name operations for long, were made before."""
    return next(_objects.setdefault(kind, itertools.count()))


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
