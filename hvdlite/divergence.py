"""A check that replicas still have the same bits: which tensors differ, and on which ranks.

Results of collectives are the same bits on all ranks, so parameters that were equal stay equal, and
one number for each tensor shows it when they do not: a bit that has flipped, or code that ran on
one rank only. An adapter computes the numbers, and each rank sends them to all others, 8 bytes for
each tensor, in one operation. So nobody has to wait for it: a `Comparison` can be under way while
gradients are reduced.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdlite import _core, basics
from hvdlite.errors import ArgumentError, DivergenceError, MismatchError, ReplicasDifferWarning
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import Exchange, ranks_text

_ACTIONS = ("raise", "warn", "repair")
_SHOWN = 3  # A message lists at most so many tensors.


@dataclass(frozen=True)
class Divergence:
    """The tensors that differ between ranks; the same on every rank that has compared."""

    # It has, by tensor, groups of ranks that have the same bits, the largest group first.
    groups: dict[str, list[list[int]]]
    compared: int  # So many tensors were compared.
    places: tuple[int, ...] = ()  # These are the differing tensors' positions among the compared.

    @property
    def minority(self) -> list[int]:
        """The ranks that differ from more than half of the ranks in some tensor."""
        found: set[int] = set()
        for first, *others in self.groups.values():
            if _is_majority(first, others):
                found.update(rank for group in others for rank in group)
        return sorted(found)

    @property
    def root(self) -> int | None:
        """The first rank that has the majority's bits of all tensors, or None."""
        common: set[int] | None = None
        for first, *others in self.groups.values():
            if not _is_majority(first, others):
                return None
            common = set(first) if common is None else common & set(first)
        return min(common) if common else None

    def text(self, owner: str) -> str:
        """Describe the differences in a sentence that begins with `owner`, who has the tensors."""
        listed = [f"'{name}' ({_between(*groups)})" for name, groups in self.groups.items()]
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        verb = "differs" if len(listed) == 1 else "differ"
        return (
            f"{owner}: {len(listed)} of {self.compared} tensors {verb} between ranks: "
            f"{', '.join(listed[:_SHOWN])}{more}"
        )

    def error(self, owner: str) -> DivergenceError:
        """Make the error that all ranks raise."""
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


def compare(
    names: Sequence[str], numbers: Sequence[int], process_set: ProcessSet
) -> Divergence | None:
    """Compare one number for each tensor; return which differ between the members, or None."""
    # Each number is a signed integer of 64 bits. All members of the process set call this function.
    # Members that have other tensors, or the same ones in another order, get a MismatchError.
    number = member_id(process_set)
    if process_set.size() == 1:
        return None
    name = next_name("replicas", number)
    return Comparison(name, names, numbers, process_set, blocking=True).finish()


def array_word_sum(array: Any) -> int:
    """Sum the 8-byte words of a contiguous array, modulo 2^64; bytes at its end are words, too."""
    flat = array.reshape(-1).view("uint8")
    whole = flat.size // 8 * 8
    total = int(flat[:whole].view("int64").sum()) + int(flat[whole:].sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


class Comparison:
    """A running comparison of one number for each tensor. All members begin and finish it."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        numbers: Sequence[int],
        process_set: ProcessSet,
        blocking: bool,
    ) -> None:
        """Send this rank's numbers: for each tensor a signed integer of 64 bits."""
        # `name` identifies the operation on all ranks. `blocking` says that the caller calls
        # `finish` at once.
        self._names = list(names)
        own = [zlib.crc32(b"\n".join(map(_core.utf8_of_name, names))), *numbers]
        self._exchange = Exchange(name, own, process_set, blocking)

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self._exchange.name

    def finish(self) -> Divergence | None:
        """Wait for the other ranks' numbers; return which tensors differ, or None."""
        # The call raises a MismatchError if the members have other tensors, or the same ones in
        # another order.
        by_rank = self._exchange.finish()
        first, *others = by_rank.values()
        if self._exchange.uneven or any(one[0] != first[0] for one in others):
            raise MismatchError(
                "the ranks compare replicas of different tensors, or in another order; give every "
                "rank the same named parameters"
            )
        if all(one == first for one in others):
            return None
        differing = [i for i in range(len(first)) if any(one[i] != first[i] for one in others)]
        groups = {
            _unique(self._names, i - 1): _grouped({rank: one[i] for rank, one in by_rank.items()})
            for i in differing
        }
        return Divergence(groups, len(self._names), tuple(i - 1 for i in differing))


def _unique(names: Sequence[str], at: int) -> str:
    """Return a name that no other tensor has."""
    return names[at] if names.count(names[at]) == 1 else f"{names[at]} [{at}]"


def _grouped(values: dict[int, int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def react(
    divergence: Divergence,
    then: str,
    owner: str,
    process_set: ProcessSet,
    repair: Callable[[int], None],
) -> None:
    """Do what a replica watch was told to do where replicas differ."""
    # `then` is "raise", "warn" or "repair". `repair` gives all members the state of one rank; where
    # no rank has the majority's bits, it cannot, and DivergenceError is raised. The first member of
    # the process set warns.
    root = divergence.root
    if then == "raise" or (then == "repair" and root is None):
        refuse(divergence, owner, process_set)
    done = ""
    if then == "repair" and root is not None:
        repair(root)
        done = f"; all ranks now have those of rank {root}"
    text = divergence.text(owner) + done
    _tell_view(divergence, text, process_set)
    if basics.rank() == process_set.ranks[0]:
        warnings.warn(text, ReplicasDifferWarning, stacklevel=3)


def refuse(divergence: Divergence, owner: str, process_set: ProcessSet) -> NoReturn:
    """Raise the DivergenceError that all ranks raise, and tell the live view."""
    _tell_view(divergence, divergence.text(owner), process_set)
    raise divergence.error(owner)


def _tell_view(divergence: Divergence, text: str, process_set: ProcessSet) -> None:
    """Add an event of each rank that has diverged; of the first one where there is no majority."""
    if basics.rank() in (divergence.minority or process_set.ranks[:1]):
        basics.engine().note("diverged", next(iter(divergence.groups)), text)


def check_interval() -> int:
    """Return after how many steps HVDLITE_CHECK_REPLICAS has replicas compared; 0 is never."""
    return int(_core.knob_values()["check_replicas"])


@functools.cache
def warn_of_no_check(what: str) -> None:
    """Warn on rank 0, once, that HVDLITE_CHECK_REPLICAS does not compare what `what` trains."""
    every = check_interval()
    if every > 0 and basics.rank() == 0:
        warnings.warn(
            f"HVDLITE_CHECK_REPLICAS={every} does not compare what {what} trains; call "
            f"hvd.check_replicas(variables) once in {every} steps, on every rank",
            UserWarning,
            stacklevel=3,
        )


def check_name(where: str) -> str:
    """Return what messages call the replica check that HVDLITE_CHECK_REPLICAS sets."""
    return f"HVDLITE_CHECK_REPLICAS, {where}"


def check_arguments(every: int, then: str) -> None:
    """Raise ArgumentError if an argument of a replica watch cannot be used."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ArgumentError(f"every={every!r}: give the number of steps between two checks")
    if then not in _ACTIONS:
        raise ArgumentError(f"then={then!r}: use 'raise', 'warn' or 'repair'")
