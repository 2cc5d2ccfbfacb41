"""Process sets: groups of ranks that run collectives of their own.

Every rank registers a process set, by `init(process_sets=...)` or later by `add_process_set`. Then
its members can submit collectives to it. Process sets may overlap. Ranks keep their numbers: a
`root_rank` is always a rank of the world. `ProcessSet.rank` is the position among the members, and
`allgather` concatenates in the order of these positions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite import _core, ops
from hvdlite.errors import ArgumentError, NotInitializedError

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "process_set_by_id",
    "process_sets",
    "remove_process_set",
]


class ProcessSet:
    """A group of ranks. Every rank must register it before its members use it.

    Args:
        ranks: the members, in any order.

    Raises:
        ArgumentError: `ranks` are not numbers, or one number is given twice.

    Example:
        >>> first = hvd.ProcessSet([0, 1])  # two ranks of four
        >>> hvd.add_process_set(first)
        >>> if first.included():
        ...     total = hvd.allreduce(tensor, process_set=first)

    Attributes:
        process_set_id: its number in this world, the same on every rank; None unless registered.
        ranks: the members, in ascending order.
    """

    mpi_comm = None  # Horovod has this attribute; there are no MPI communicators here.

    def __init__(self, ranks: Iterable[int]) -> None:
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
        """Return the number of members; None unless the process set is registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's position among the members; None unless the set is registered.

        Raises:
            ArgumentError: this rank is not a member.
        """
        if self.process_set_id is None:
            return None
        if _world().rank not in self.ranks:
            raise ArgumentError(
                f"rank {_world().rank} is not a member of {self}; ask process_set.included() first"
            )
        return self.ranks.index(_world().rank)

    def included(self) -> bool | None:
        """Return whether this rank is a member; None unless the process set is registered."""
        if self.process_set_id is None:
            return None
        if self.process_set_id in _broken:
            return _broken[self.process_set_id]
        return self.process_set_id == 0 or _world().rank in self.ranks

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """Return this object: a copy of an optimizer uses the same process set."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the ranks; loading returns the registered set of these ranks, if any."""
        return find, (None if self is global_process_set else self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"


class _World(NamedTuple):
    engine: _core.Engine
    rank: int
    size: int


class _Static(NamedTuple):
    """A process set that `init` was given in an elastic job, with its id and ranks at that time."""

    process_set: ProcessSet
    number: int
    ranks: list[int]


global_process_set = ProcessSet([])
"""The process set of all ranks, which is the default of every operation."""


def find(ranks: list[int] | None) -> ProcessSet:
    """Return the registered process set of these ranks (None: of all), or one to register."""
    if ranks is None:
        return global_process_set
    known = (
        equals[0]
        for number, equals in _registered.items()
        if equals[0].ranks == ranks and number not in _broken
    )
    return next(known, None) or ProcessSet(ranks)


_current: _World | None = None
_static: list[_Static] = []  # Only an elastic job has any.
# An elastic job keeps here, by id, the process sets that have lost a member, and whether this rank
# is a member. Their `ranks` are numbers of a former world.
_broken: dict[int, bool] = {}
# The keys are ids; static objects of equal ranks share one.
_registered: dict[int, list[ProcessSet]] = {}


def _world() -> _World:
    if _current is None:
        raise NotInitializedError("hvdlite has not been initialized; call hvd.init() first")
    return _current


def _enter(process_set: ProcessSet, number: int) -> None:
    process_set.process_set_id = number
    equals = _registered.setdefault(number, [])
    if not any(process_set is one for one in equals):
        equals.append(process_set)


def keep_static(process_sets: Sequence[ProcessSet]) -> None:
    """Store the process sets that `init` was given in an elastic job, for all of its worlds."""
    # Each has the same id on all ranks and in all worlds, because graphs of TensorFlow hold it.
    global _static
    numbers: dict[tuple[int, ...], int] = {}
    _static = [
        _Static(one, numbers.setdefault(tuple(one.ranks), len(numbers) + 1), list(one.ranks))
        for one in process_sets
    ]


def check_static(size: int) -> None:
    """Raise ArgumentError on every rank if a stored process set names a rank that is missing."""
    for process_set, _, ranks in _static:
        if not ranks or ranks[0] < 0 or ranks[-1] >= size:
            raise ArgumentError(
                f"{process_set} cannot be registered: the world has the ranks 0 to {size - 1}"
            )


def static_ranks(size: int) -> dict[int, list[int]]:
    """Return the ranks of the stored process sets whose ranks a world of `size` has, by id."""
    return {number: ranks for _, number, ranks in _static if ranks and ranks[-1] < size}


def begin(
    engine: _core.Engine,
    rank: int,
    size: int,
    sets: Mapping[int, Sequence[int]],
    resumes: bool = False,
) -> None:
    """Begin in a world; of an elastic job's one, `sets` has the ranks of the process sets by id."""
    # With `resumes` the registered process sets go on. Those that the engine does not have are
    # broken: they have lost a member, and their operations raise RankFailedError until the next
    # boundary. Without `resumes` all end, and those that `init` was given begin anew.
    global _current
    if not resumes:
        end()
        _enter(global_process_set, 0)
        for process_set, number, ranks in _static:
            process_set.ranks = list(ranks)
            if number in sets:
                _enter(process_set, number)
    present: dict[int, Sequence[int]] = {0: range(size), **sets}
    for number, equals in _registered.items():
        if number not in present and number not in _broken:
            _broken[number] = bool(equals[0].included())  # The former world's numbers say so.
    _current = _World(engine, rank, size)
    for number, members in present.items():
        for process_set in _registered.get(number, []):
            process_set.ranks = list(members)


def drop_broken() -> None:
    """Unregister the process sets that have lost a member, at a boundary of an elastic job."""
    while _broken:
        number, _ = _broken.popitem()
        for process_set in _registered.pop(number, []):
            process_set.process_set_id = None
        ops.forget_names(number)


def end() -> None:
    global _current
    _current = None
    for equals in _registered.values():
        for process_set in equals:
            process_set.process_set_id = None
    _registered.clear()
    _broken.clear()
    global_process_set.ranks = []


StaticSets = Sequence[ProcessSet | Sequence[int]] | str | None


def static_sets(given: StaticSets) -> list[ProcessSet]:
    """Turn the argument `process_sets` of `init` into a list, or raise ArgumentError."""
    if isinstance(given, str):
        if given != "dynamic":
            raise ArgumentError(f'process_sets={given!r}: give a list of sets, "dynamic" or None')
        return []
    return [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in given or ()]


def register_static(process_sets: Sequence[ProcessSet]) -> None:
    """Register the process sets that `init` was given; every rank gives the same ones."""
    # Two of them may have equal ranks, unlike in `add_process_set`: they then share one id. If a
    # rank does not exist, every rank gets an ArgumentError.
    for process_set in process_sets:
        number = next(
            (n for n, equals in _registered.items() if equals[0].ranks == process_set.ranks), None
        )
        _enter(process_set, _add(process_set) if number is None else number)


def _add(process_set: ProcessSet) -> int:
    # The name is one of the barriers' names: if another rank calls barrier() instead, both meet
    # under this name and get a MismatchError, rather than wait for each other.
    handle = _world().engine.add_process_set(ops.next_name("barrier"), process_set.ranks)
    handle.wait()
    return handle.set_id


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, at any time. Every rank calls it with the same ranks, member or not.

    It returns when all ranks have called it. Collectives of other process sets continue meanwhile.

    Args:
        process_set: a process set, or the ranks to make one of.

    Returns:
        The registered process set.

    Raises:
        ArgumentError: a rank does not exist, or a process set of these ranks is registered already
            (the process set of all ranks always is). Every rank gets this error.
        MismatchError: another rank adds other ranks, or calls something else. Every rank gets this
            error.

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
    """Unregister a process set, at any time. Every rank calls it, member or not.

    Operations that were submitted to it before end first; later ones raise an error. The process
    set may be added again.

    Args:
        process_set: a registered process set.

    Returns:
        True; False for `global_process_set`, which stays registered.

    Raises:
        ArgumentError: the process set is not registered, or was removed already.
        MismatchError: another rank removes another process set.
        DeadlockError: another rank waits for this rank in a collective of this one. Every rank gets
            this error, which says where each of them waits, and the process set stays.

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
    world.engine.remove_process_set(ops.next_name("barrier"), number).wait()
    for equal in _registered.pop(number, []):
        equal.process_set_id = None
    ops.forget_names(number)
    return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the registered process set of this number.

    Args:
        process_set_id: `ProcessSet.process_set_id`, the same on every rank; 0 is that of all ranks.

    Raises:
        ArgumentError: no process set has this number.
    """
    _world()
    if process_set_id not in _registered:
        raise ArgumentError(f"there is no process set {process_set_id}")
    return _registered[process_set_id][0]


def process_sets() -> list[ProcessSet]:
    """Return the registered process sets by number; that of all ranks has the number 0."""
    return [_registered[number][0] for number in sorted(_registered)]


def registered_id(process_set: ProcessSet) -> int:
    """Return the number of a process set; raise ArgumentError if it is not registered."""
    if not isinstance(process_set, ProcessSet):
        raise ArgumentError(
            f"process_set={process_set!r} is not a ProcessSet; make one with hvd.add_process_set"
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
    """Return the number of a process set to which this rank may submit; or raise ArgumentError."""
    number = registered_id(process_set)
    if not process_set.included():
        raise ArgumentError(
            f"rank {_world().rank} is not a member of {process_set!r}; only its members take part"
        )
    return number


def check_root(root_rank: int, process_set: ProcessSet) -> int:
    """Return `root_rank`; raise ArgumentError if it is not a member of the process set."""
    size = _world().size
    if not 0 <= root_rank < size:
        raise ArgumentError(
            f"root_rank={root_rank} is not a rank of this world: it has {size}, from 0 to "
            f"{size - 1}"
        )
    if root_rank not in process_set.ranks:
        raise ArgumentError(
            f"root_rank={root_rank} is not a member of {process_set!r}; it is a rank of the world, "
            "not a position in the set"
        )
    return root_rank
