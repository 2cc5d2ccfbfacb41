"""A check that all ranks train the same model: they compare one number for each parameter.

Averaged gradients keep equal models equal; they do not make different models equal. If nothing was
broadcast, ranks begin with different parameters, and each trains a model of its own without an
error. An adapter computes the numbers from its parameters' bits, and this module compares them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hvdlite import _core, basics
from hvdlite.process_sets import ProcessSet, global_process_set, member_id

_INT64 = _core.DTYPES["int64"]
_SHOWN = 8  # A message lists at most so many ranks.

SILENCE = (
    "where that is meant, silence this with "
    "warnings.filterwarnings('ignore', category=hvd.ReplicasDifferWarning)"
)


class Exchange:
    """A running exchange: every member of a process set sends one number for each parameter."""

    def __init__(
        self, name: str, numbers: Sequence[int], process_set: ProcessSet, blocking: bool
    ) -> None:
        """Send this rank's numbers, each a signed integer of 64 bits."""
        # `name` identifies the operation on all ranks. `blocking` says that the caller calls
        # `finish` at once.
        self.name = name
        self.uneven = False  # `finish` sets it if some rank sent more or fewer numbers.
        self._process_set = process_set
        self._ranks = list(process_set.ranks)
        self._count = len(numbers)
        data = array("q", numbers)
        tensor = _core.Tensor(name, _INT64, [len(data)], data.buffer_info()[0], 0)
        self._handle = basics.engine().allgather(
            name, [tensor], member_id(process_set), keep=data, blocking=blocking
        )

    def finish(self) -> dict[int, list[int]]:
        """Wait, and return the numbers by rank, in the order of the ranks."""
        self._handle.wait()
        received = array("q")
        received.frombytes(self._handle.take_output())
        numbers, begin = {}, 0
        lengths = self._handle.first_dimensions
        for rank, length in zip(self._senders(len(lengths)), lengths, strict=True):
            if length == self._count:  # A rank that has joined sends no numbers.
                numbers[rank] = received[begin : begin + length].tolist()
            # A rank that sent fewer or more numbers than this rank is left out.
            elif length > 0:
                self.uneven = True
            begin += length
        return numbers

    def _senders(self, count: int) -> Sequence[int]:
        """Return the ranks of so many senders: in an elastic job some may have died meanwhile."""
        # No rank knows from its own ranks alone whether the result is from before a death: another
        # rank may be in the next world already. So only the names of ranks depend on these, and
        # never what ranks conclude from the numbers.
        for ranks in (self._ranks, self._process_set.ranks):
            if len(ranks) == count:
                return ranks
        return range(count)


def difference(
    owner: str, names: Sequence[str], numbers: dict[int, list[int]], advice: str
) -> str | None:
    """Describe which parameters differ between ranks; None if all are equal."""
    # `owner` is what the message calls the optimizer or model. `numbers` has, for each rank, one
    # number for each parameter. `advice` says what the user can do.
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
    """Return whether this rank prints the warning: it is the first of those that compared."""
    return next(iter(numbers)) == basics.rank()


def set_text(process_set: ProcessSet) -> str:
    """Write the arguments of a broadcast within a process set, for a message."""
    if process_set is global_process_set:
        return "root_rank=0"
    return f"root_rank={process_set.ranks[0]}, process_set=..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Write a list of ranks for a message: "rank 1", "ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    rest = "" if len(ranks) <= _SHOWN else f" and {len(ranks) - _SHOWN} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
