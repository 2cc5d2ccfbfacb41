"""Process sets: some of the ranks, which run collectives of their own.

A set is known to the world once every rank has registered it, at `init(process_sets=...)` or later
with `add_process_set`; only its members submit to it. Sets may overlap. Ranks keep their numbers:
a `root_rank` is always a rank of the world, and `ProcessSet.rank` tells the position in the set,
in whose order results of `allgather` are.

Example:
    >>> import hvdlite.torch as hvd
    >>> hvd.init()
    >>> first_half = hvd.add_process_set(range(hvd.size() // 2))
    >>> if first_half.included():
    ...     mean = hvd.allreduce(tensor, process_set=first_half)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvdlite import _core, operation_names
from hvdlite.errors import ArgumentError, NotInitializedError


class ProcessSet:
    """Some of the ranks. Make it of any ranks, and register it on every rank before it is used.

    Attributes:
        process_set_id: its number in this world, the same on every rank; None unless registered.
        ranks: the members, ascending.
    """

    mpi_comm = None  # Horovod's; there are no MPI communicators here.

    def __init__(self, ranks: Iterable[int]) -> None:
        """Name the members.

        Args:
            ranks: numbers of ranks, in any order.

        Raises:
            ArgumentError: these are no numbers, or one comes twice.
        """
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks)
        except TypeError as error:
            raise ArgumentError(
                f"ProcessSet({ranks!r}): give the numbers of its ranks, such as [0, 2]"
            ) from error
        if len(set(self.ranks)) < len(self.ranks):
            raise ArgumentError(f"ProcessSet({self.ranks}): a rank is in it twice")
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return how many members it has; None unless it is registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's position among the members; None unless it is registered.

        Raises:
            ArgumentError: this process is no member.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ArgumentError(f"rank {_world().rank} is no member of {self}")
        return self.ranks.index(_world().rank)

    def included(self) -> bool | None:
        """Say whether this process is a member; None unless the set is registered."""
        if self.process_set_id is None:
            return None
        return self.process_set_id == 0 or _world().rank in self.ranks

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """Return this set: there is one of its ranks, and what is copied with it uses that one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the ranks: where a set of these ranks is registered, that one is loaded."""
        return _find, (None if self is global_process_set else self.ranks,)

    def __repr__(self) -> str:
        """Show the members."""
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"


class _World(NamedTuple):
    """What sets are registered with."""

    engine: _core.Engine
    rank: int
    size: int


global_process_set = ProcessSet([])
"""All ranks: what every operation takes that is given no other set."""


def _find(ranks: list[int] | None) -> ProcessSet:
    if ranks is None:
        return global_process_set
    known = (equals[0] for equals in _registered.values() if equals[0].ranks == ranks)
    return next(known, None) or ProcessSet(ranks)


_current: _World | None = None
_registered: dict[int, list[ProcessSet]] = {}  # by id; static ones of equal ranks share one


def _world() -> _World:
    if _current is None:
        raise NotInitializedError("hvdlite has not been initialized; call hvd.init() first")
    return _current


def _enter(process_set: ProcessSet, number: int) -> None:
    process_set.process_set_id = number
    equals = _registered.setdefault(number, [])
    if not any(process_set is one for one in equals):
        equals.append(process_set)


def begin(engine: _core.Engine, rank: int, size: int) -> None:
    """Know the world that `init` has made."""
    global _current
    _current = _World(engine, rank, size)
    global_process_set.ranks = list(range(size))
    _enter(global_process_set, 0)


def end() -> None:
    """Forget the world and all of its sets."""
    global _current
    _current = None
    for equals in _registered.values():
        for process_set in equals:
            process_set.process_set_id = None
    _registered.clear()
    global_process_set.ranks = []


StaticSets = Sequence[ProcessSet | Sequence[int]] | str | None


def static_sets(given: StaticSets) -> list[ProcessSet]:
    """Return the sets that `init` was given.

    Raises:
        ArgumentError: it was given something else.
    """
    if isinstance(given, str):
        if given != "dynamic":
            raise ArgumentError(f'process_sets={given!r}: give a list of sets, "dynamic" or None')
        return []
    return [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in given or ()]


def register_static(process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets that `init` was given, on every rank the same ones.

    Unlike later, ranks that are registered already are fine: the set is that one.

    Raises:
        ArgumentError: there are no such ranks; on every rank.
    """
    for process_set in process_sets:
        number = next(
            (n for n, equals in _registered.items() if equals[0].ranks == process_set.ranks), None
        )
        _enter(process_set, _add(process_set) if number is None else number)


def _add(process_set: ProcessSet) -> int:
    # Named as barriers are: a rank that goes on to one instead meets this, and hears of it.
    handle = _world().engine.add_process_set(
        operation_names.next_name("barrier"), process_set.ranks
    )
    handle.wait()
    return handle.set_id


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set, at any time. Every rank calls it, members or not, with the same ranks.

    It returns when all ranks have called it. What is under way in other sets goes on.

    Args:
        process_set: a set, or the ranks to make one of.

    Returns:
        The set, registered.

    Raises:
        ArgumentError: there is no such rank, or a set of these ranks (the world is one) already; on
            every rank.
        MismatchError: other ranks add another set, or do something else; on every rank.

    Example:
        >>> pair = hvd.add_process_set([0, 1])
        >>> pair.size()
        2
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ArgumentError(f"{process_set} is registered already")
    _enter(process_set, _add(process_set))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set, at any time. Every rank calls it, members or not.

    What was submitted to the set before ends first; what comes later raises an error. The set may
    be added again.

    Args:
        process_set: a registered set.

    Returns:
        True; False for `global_process_set`, which stays.

    Raises:
        ArgumentError: the set is not registered (any more).
        MismatchError: other ranks remove another set, or wait for this one in a collective of the
            set; on all of them, and the set stays.

    Example:
        >>> hvd.remove_process_set(pair)
        True
    """
    world = _world()
    number = process_set.process_set_id
    if number is None:
        raise ArgumentError(f"{process_set} is not registered, or was removed already")
    if number == 0:
        return False
    world.engine.remove_process_set(operation_names.next_name("barrier"), number).wait()
    for equal in _registered.pop(number, []):
        equal.process_set_id = None
    operation_names.forget(number)
    return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the registered set of that number.

    Raises:
        ArgumentError: there is none.
    """
    _world()
    if process_set_id not in _registered:
        raise ArgumentError(f"there is no process set {process_set_id}")
    return _registered[process_set_id][0]


def process_sets() -> list[ProcessSet]:
    """Return the registered sets, the world first."""
    return [_registered[number][0] for number in sorted(_registered)]


def registered_id(process_set: ProcessSet) -> int:
    """Return the number of a set.

    Raises:
        ArgumentError: it is not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise ArgumentError(
            f"process_set={process_set!r} is no ProcessSet; make one with hvd.add_process_set"
        )
    if process_set.process_set_id is None:
        _world()
        raise ArgumentError(
            f"{process_set!r} is not registered: add it with hvd.add_process_set or "
            "hvd.init(process_sets=...) on every rank; a set that was removed, or is of a world "
            "before shutdown(), has to be added again"
        )
    return process_set.process_set_id


def member_id(process_set: ProcessSet) -> int:
    """Return the number of a set that this process may submit to.

    Raises:
        ArgumentError: it is not registered, or this process is no member.
    """
    number = registered_id(process_set)
    if not process_set.included():
        raise ArgumentError(
            f"rank {_world().rank} is no member of {process_set!r}; only its members take part"
        )
    return number


def check_root(root_rank: int, process_set: ProcessSet) -> int:
    """Return `root_rank`, a rank of the world, if it is a member.

    Raises:
        ArgumentError: it is not.
    """
    size = _world().size
    if not 0 <= root_rank < size:
        raise ArgumentError(
            f"root_rank={root_rank} is no rank of this world: it has {size}, from 0 to {size - 1}"
        )
    if root_rank not in process_set.ranks:
        raise ArgumentError(
            f"root_rank={root_rank} is no member of {process_set!r}; it is a rank of the world, "
            "not a position in the set"
        )
    return root_rank
