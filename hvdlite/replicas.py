"""Whether ranks train copies of one model: numbers made of the parameters are compared.

Averages of gradients keep copies alike and do not make them so. Ranks that begin with different
parameters, because nothing was broadcast, train on without an error, each a model of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hvdlite import _core, basics
from hvdlite.process_sets import ProcessSet, global_process_set, member_id

_INT64 = _core.DTYPES["int64"]
_SHOWN = 8  # ranks in a message

SILENCE = (
    "where that is meant, silence this with "
    "warnings.filterwarnings('ignore', category=hvd.ReplicasDifferWarning)"
)


class Exchange:
    """One number per parameter from every member of a process set, on its way."""

    def __init__(
        self, name: str, numbers: Sequence[int], process_set: ProcessSet, blocking: bool
    ) -> None:
        """Send this rank's.

        Args:
            name: identifies the operation on all ranks.
            numbers: of 64 bits, with a sign.
            process_set: whose members compare.
            blocking: whether the caller waits at once.
        """
        self.name = name
        self._process_set = process_set
        self._count = len(numbers)
        data = array("q", numbers)
        tensor = _core.Tensor(name, _INT64, [len(data)], data.buffer_info()[0], 0)
        self._handle = basics.engine().allgather(
            name, [tensor], member_id(process_set), keep=data, blocking=blocking
        )

    def finish(self) -> dict[int, list[int]]:
        """Wait, and return the numbers by rank, in order: of those that gave as many as this one.

        Raises:
            HvdliteError: whatever made it fail.
        """
        self._handle.wait()
        received = array("q")
        received.frombytes(self._handle.take_output())
        numbers, begin = {}, 0
        lengths = self._handle.first_dimensions
        for rank, length in zip(self._process_set.ranks, lengths, strict=True):
            if length == self._count:  # A rank that has joined gives none.
                numbers[rank] = received[begin : begin + length].tolist()
            begin += length
        return numbers


def difference(
    owner: str, names: Sequence[str], numbers: dict[int, list[int]], advice: str
) -> str | None:
    """Say in words which parameters differ between ranks; None where none does.

    Args:
        owner: of the parameters, as messages call it.
        names: of the parameters.
        numbers: of each rank, one for each parameter.
        advice: what to do.

    Example:
        >>> difference("it", ["a", "b"], {0: [1, 2], 2: [1, 3]}, "do this")[:65]
        "it: 1 of 2 parameters differ between rank 0 and rank 2, first 'b'"
    """
    (first, own), *others = numbers.items()
    differing = [i for i in range(len(names)) if any(theirs[i] != own[i] for _, theirs in others)]
    if not differing:
        return None
    ranks = ranks_text([rank for rank, theirs in others if theirs != own])
    return (
        f"{owner}: {len(differing)} of {len(names)} parameters differ between rank {first} and "
        f"{ranks}, first '{names[differing[0]]}', so that ranks train models of their own; "
        f"{advice}; {SILENCE}"
    )


def speaks(numbers: dict[int, list[int]]) -> bool:
    """Say whether this rank is the one that warns: the first of those that compared."""
    return next(iter(numbers)) == basics.rank()


def set_text(process_set: ProcessSet) -> str:
    """Write the arguments of a broadcast within a process set.

    Example:
        >>> set_text(global_process_set)
        'root_rank=0'
    """
    if process_set is global_process_set:
        return "root_rank=0"
    return f"root_rank={process_set.ranks[0]}, process_set=..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Write a list of ranks.

    Example:
        >>> ranks_text([1]), ranks_text([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    rest = "" if len(ranks) <= _SHOWN else f" and {len(ranks) - _SHOWN} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
