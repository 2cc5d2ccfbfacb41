"""Do all ranks have the same parameters, bit for bit? Ranks compare one number for each tensor.

An adapter sums the words of its tensors, and each rank sends the sums to all others in one
operation, which can be under way while gradients are reduced.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdlite import _core, basics
from hvdlite.errors import DivergenceError, MismatchError
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id

_INT64 = _core.DTYPES["int64"]
_RANKS_SHOWN = 8  # A message lists at most so many ranks.
_TENSORS_SHOWN = 3  # A message lists at most so many tensors.

SILENCE = (
    "where that is meant, silence this with "
    "warnings.filterwarnings('ignore', category=hvd.ReplicasDifferWarning)"
)


@dataclass(frozen=True)
class Divergence:
    """The tensors that differ between ranks; the same on every rank that has compared."""

    # It has, by tensor, groups of ranks that have the same bits, the largest group first.
    groups: dict[str, list[list[int]]]
    compared: int  # So many tensors were compared.

    @property
    def minority(self) -> list[int]:
        """The ranks that differ from more than half of the ranks in some tensor."""
        found: set[int] = set()
        for first, *others in self.groups.values():
            if _is_majority(first, others):
                found.update(rank for group in others for rank in group)
        return sorted(found)

    def warning(self, owner: str, advice: str) -> str | None:
        """Describe parameters that differ before training; None on all ranks but the first."""
        # `owner` is what the message calls the optimizer or model.
        first = min(rank for group in next(iter(self.groups.values())) for rank in group)
        if first != basics.rank():
            return None
        others = {
            rank
            for groups in self.groups.values()
            for group in groups
            if first not in group
            for rank in group
        }
        return (
            f"{owner}: {len(self.groups)} of {self.compared} parameters differ between rank "
            f"{first} and {ranks_text(sorted(others))}, first '{next(iter(self.groups))}', so that "
            f"ranks train models of their own; {advice}; {SILENCE}"
        )

    def text(self, owner: str) -> str:
        """Describe the differences in a sentence that begins with `owner`, who has the tensors."""
        listed = [f"'{name}' ({_between(*groups)})" for name, groups in self.groups.items()]
        more = f" and {len(listed) - _TENSORS_SHOWN} more" if len(listed) > _TENSORS_SHOWN else ""
        verb = "differs" if len(listed) == 1 else "differ"
        return (
            f"{owner}: {len(listed)} of {self.compared} tensors {verb} between ranks: "
            f"{', '.join(listed[:_TENSORS_SHOWN])}{more}"
        )

    def error(self, owner: str) -> DivergenceError:
        error: DivergenceError = DivergenceError(
            f"{self.text(owner)}; memory or code of that rank alone has changed them: go on from "
            "the last checkpoint, or broadcast parameters and optimizer state again, and replace a "
            "host that diverges again"
        )
        error.tensors = tuple(self.groups)
        error.ranks = tuple(self.minority)
        error.failed_rank = next(iter(error.ranks), None)
        return error


def _is_majority(first: list[int], others: Sequence[list[int]]) -> bool:
    return len(first) > sum(map(len, others))


def _between(first: list[int], *others: list[int]) -> str:
    if not _is_majority(first, others):
        groups = [ranks_text(group) for group in (first, *others)]
        return f"{', '.join(groups[:-1])} and {groups[-1]} differ, and none has a majority"
    rest = sorted(rank for group in others for rank in group)
    verb = "differs" if len(rest) == 1 else "differ"
    return f"{ranks_text(rest)} {verb} from {ranks_text(first)}"


def divergence_of(names: Sequence[str], numbers: Mapping[int, Sequence[int]]) -> Divergence | None:
    """Return which tensors differ, by the numbers that each rank has for them, or None."""
    first, *others = numbers.values()
    if all(own == first for own in others):
        return None
    groups = {}
    for i, name in enumerate(names):
        ranks_of: dict[int, list[int]] = {}
        for rank, own in numbers.items():
            ranks_of.setdefault(own[i], []).append(rank)
        if len(ranks_of) > 1:
            unique = name if names.count(name) == 1 else f"{name} [{i}]"
            groups[unique] = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return Divergence(groups, len(names))


class Exchange:
    """A running exchange: every member of a process set sends one number for each parameter."""

    def __init__(
        self, name: str, numbers: Sequence[int], process_set: ProcessSet, blocking: bool
    ) -> None:
        """Send this rank's numbers, each a signed integer of 64 bits."""
        # `blocking` says that the caller calls `finish` at once.
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


class Comparison(Exchange):
    """A running comparison of one number for each tensor. All members begin and end it."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        numbers: Sequence[int],
        process_set: ProcessSet,
        blocking: bool,
    ) -> None:
        self._names = list(names)
        own = [zlib.crc32(b"\n".join(map(_core.utf8_of_name, names))), *numbers]
        super().__init__(name, own, process_set, blocking)

    def divergence(self) -> Divergence | None:
        """Wait for the other ranks' numbers; return which tensors differ, or None.

        Raises:
            MismatchError: the members have other tensors, or the same ones in another order.
        """
        by_rank = self.finish()
        if self.uneven or len({own[0] for own in by_rank.values()}) > 1:
            raise MismatchError(
                "the ranks compare replicas of different tensors, or in another order; give every "
                "rank the same named parameters"
            )
        return divergence_of(self._names, {rank: own[1:] for rank, own in by_rank.items()})


def check(names: Sequence[str], numbers: Sequence[int], process_set: ProcessSet) -> None:
    """Raise a DivergenceError on every member of a process set unless all have the same numbers."""
    # It is `hvd.check_replicas`, once an adapter has a number for each tensor.
    number = member_id(process_set)
    if process_set.size() == 1:
        return
    name = next_name("replicas", number)
    divergence = Comparison(name, names, numbers, process_set, blocking=True).divergence()
    if divergence is not None:
        refuse(divergence, "check_replicas", process_set)


def refuse(divergence: Divergence, owner: str, process_set: ProcessSet) -> NoReturn:
    # The event is one of each rank that has diverged; of the first one where there is no majority.
    if basics.rank() in (divergence.minority or process_set.ranks[:1]):
        text = divergence.text(owner)
        basics.engine().note("diverged", next(iter(divergence.groups)), text)
    raise divergence.error(owner)


def array_word_sum(array: Any) -> int:
    """Sum the 8-byte words of a contiguous array, modulo 2^64; bytes at its end are words, too."""
    flat = array.reshape(-1).view("uint8")
    whole = flat.size // 8 * 8
    total = int(flat[:whole].view("int64").sum()) + int(flat[whole:].sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def check_interval() -> int:
    """Return after how many steps HVDLITE_CHECK_REPLICAS has replicas compared; 0 is never."""
    return int(_core.knob_values()["check_replicas"])


@functools.cache
def warn_of_no_check() -> None:
    """Warn on rank 0, once, that HVDLITE_CHECK_REPLICAS does not compare what a tape trains."""
    every = check_interval()
    if every > 0 and basics.rank() == 0:
        warnings.warn(
            f"HVDLITE_CHECK_REPLICAS={every} does not compare what a tape trains; call "
            f"hvd.check_replicas(variables) once in {every} steps, on every rank",
            UserWarning,
            stacklevel=3,
        )


def set_text(process_set: ProcessSet) -> str:
    if process_set is global_process_set:
        return "root_rank=0"
    return f"root_rank={process_set.ranks[0]}, process_set=..."


def ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    rest = "" if len(ranks) <= _RANKS_SHOWN else f" and {len(ranks) - _RANKS_SHOWN} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
