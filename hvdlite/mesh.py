"""A mesh of ranks: data, tensor and pipeline parallelism at the same time.

The ranks are numbered as in Megatron-LM (Narayanan et al. 2021, SC): the tensor parallel coordinate
varies fastest, because tensor parallel ranks exchange the most, then the data parallel one, then
the pipeline stage. This is also the order of torch's `init_device_mesh("cpu", (pp, dp, tp))`.

Example:
    >>> import hvdlite.torch as hvd
    >>> hvd.init()  # 8 ranks
    >>> mesh = hvd.mesh(tp=2, pp=2)
    >>> mesh.coordinates  # on rank 5
    Coordinates(dp=0, tp=1, pp=1)
    >>> mesh.tp.ranks, mesh.dp.ranks, mesh.pp.ranks
    ([4, 5], [5, 7], [1, 5])
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdlite import basics, operation_names, process_sets
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.gather_bytes import gather_bytes
from hvdlite.process_sets import ProcessSet


class Coordinates(NamedTuple):
    """Where a rank is in a mesh: its position in its process set of each axis."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Mesh:
    """The place of this rank in a mesh, which `mesh` makes.

    Attributes:
        dp: the ranks that hold the same part of the model, and see different samples.
        tp: the ranks that share each layer of this rank's stage, and see the same samples.
        pp: the stages of the pipeline that this rank is in, the first stage first.
        coordinates: this rank's position in each of them.
        next: the rank of the next stage, to which this rank sends activations; None in the last.
        previous: the rank of the previous stage; None in the first.

    Example:
        >>> place = hvd.mesh(dp=hvd.size())
        >>> place.dp.size(), place.next
        (1, None)
    """

    dp: ProcessSet
    tp: ProcessSet
    pp: ProcessSet
    coordinates: Coordinates
    next: int | None
    previous: int | None


class _Sizes(NamedTuple):
    """The checked sizes of the axes."""

    dp: int
    tp: int
    pp: int

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(rank // self.tp % self.dp, rank % self.tp, rank // (self.tp * self.dp))

    def sets(self) -> dict[str, list[list[int]]]:
        """List the ranks of all process sets, by axis."""
        world = range(self.dp * self.tp * self.pp)
        groups: dict[str, dict[Coordinates, list[int]]] = {axis: {} for axis in self._fields}
        for rank in world:
            coordinates = self.coordinates(rank)
            for axis, group in groups.items():
                group.setdefault(coordinates._replace(**{axis: 0}), []).append(rank)
        return {axis: list(group.values()) for axis, group in groups.items()}


def _agree(asked: str) -> None:
    """Raise MismatchError on every rank unless all ranks ask for the same mesh."""
    name = operation_names.next_name("mesh")
    answers = [bytes(one) for one in gather_bytes(basics.engine(), asked.encode(), name)]
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise MismatchError(
                f"rank 0 calls hvd.mesh({answers[0].decode()}) and rank {rank} "
                f"hvd.mesh({answer.decode()}); give the same sizes on all ranks"
            )


def _check_sizes(asked: str, given: tuple[Any, Any, Any]) -> _Sizes:
    """Return the sizes of the axes; one of them may be -1, for what is left of the world."""
    world = basics.size()
    try:
        sizes = [operator.index(size) for size in given]
    except TypeError as error:
        raise ArgumentError(f"hvd.mesh({asked}): give whole numbers") from error
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ArgumentError(
            f"hvd.mesh({asked}): each size is 1 or more, and one of them may be -1, for the ranks "
            "that are left"
        )
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = max(1, world // known)
    if math.prod(sizes) != world:
        raise ArgumentError(
            f"hvd.mesh({asked}) does not have the {world} ranks of this world: dp * tp * pp must "
            "be the number of ranks"
        )
    return _Sizes(*sizes)


def _check_hosts(asked: str, groups: list[list[int]]) -> None:
    """Check that the ranks of each tensor parallel group are on one host."""
    host_of = basics.host_of()
    for group in groups:
        other = next((rank for rank in group if host_of[rank] != host_of[group[0]]), None)
        if other is not None:
            raise ArgumentError(
                f"hvd.mesh({asked}): ranks {group[0]} and {other} of the tensor parallel group "
                f"{group} are on different hosts; choose a tp that divides the number of ranks of "
                "every host, and start the ranks host by host"
            )


def _registered(ranks: list[int]) -> ProcessSet:
    process_set = process_sets.find(ranks)
    if process_set.process_set_id is None:
        process_sets.add_process_set(process_set)
    return process_set


def mesh(dp: int = -1, tp: int = 1, pp: int = 1) -> Mesh:
    """Arrange the ranks for data, tensor and pipeline parallelism. Every rank calls it.

    It registers the process sets of all axes that are not registered yet. In an elastic job call it
    in the function that `hvd.elastic.run` runs, because a mesh is of one world.

    Args:
        dp: how many replicas of the model there are; -1 makes as many as the ranks allow.
        tp: how many ranks share each layer. They are neighbours, and on one host.
        pp: how many stages the model has.

    Returns:
        The process sets, coordinates and neighbours of this rank.

    Raises:
        ArgumentError: the sizes do not multiply to the number of ranks, or a tensor parallel group
            would be on several hosts. Every rank gets this error.
        MismatchError: another rank gives other sizes. Every rank gets this error.

    Example:
        >>> mesh = hvd.mesh(tp=2)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, process_set=mesh.dp)
    """
    asked = f"dp={dp!r}, tp={tp!r}, pp={pp!r}"
    _agree(asked)
    sizes = _check_sizes(asked, (dp, tp, pp))
    sets = sizes.sets()
    _check_hosts(asked, sets["tp"])
    rank = basics.rank()
    own = {
        axis: next(one for one in [_registered(group) for group in groups] if rank in one.ranks)
        for axis, groups in sets.items()
    }
    coordinates = sizes.coordinates(rank)
    stages = own["pp"].ranks
    return Mesh(
        **own,
        coordinates=coordinates,
        next=stages[coordinates.pp + 1] if coordinates.pp + 1 < sizes.pp else None,
        previous=stages[coordinates.pp - 1] if coordinates.pp else None,
    )
