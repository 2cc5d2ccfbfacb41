"""The base of states with tensors: all adapters synchronize them in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite import basics
from hvdlite.elastic.state import ObjectState
from hvdlite.errors import MismatchError
from hvdlite.objects import broadcast_object
from hvdlite.operation_names import next_name
from hvdlite.process_sets import global_process_set
from hvdlite.rendezvous import environment
from hvdlite.replicas import Exchange, ranks_text


class TensorState(ObjectState):
    """A state with tensors that all ranks must have alike. Adapters say which they are."""

    _has_synchronized = False

    def __init__(self, **kwargs: Any) -> None:
        """Make the attributes that are plain objects."""
        super().__init__(broadcast_object, basics.rank, **kwargs)

    def sync(self) -> None:
        """Replace the state of every rank by that of rank 0, and save it.

        With HVDLITE_ELASTIC_VERIFY=1 the ranks that are not new compare their parameters first.

        Raises:
            MismatchError: this rank's tensors are not like rank 0's; or parameters that are to be
                equal have different values.
        """
        layout = self._layout()
        check_layout(layout, broadcast_object(layout, root_rank=0), basics.rank())
        if environment.elastic_verify():
            self._verify()
        self._sync_tensors()
        super().sync()
        self._has_synchronized = True

    def _layout(self) -> dict[str, str]:
        """Describe the tensors that must be alike on all ranks, by name."""
        raise NotImplementedError

    def _sync_tensors(self) -> None:
        """Receive rank 0's tensors."""
        raise NotImplementedError

    def _parameters(self) -> dict[str, Any]:
        """Return what training updates alike on all ranks, by name."""
        raise NotImplementedError

    def _checksums(self, parameters: Sequence[Any]) -> list[int]:
        """Compute a checksum of each parameter's bits."""
        raise NotImplementedError

    def _verify(self) -> None:
        parameters = self._parameters()
        numbers = [int(self._has_synchronized), *self._checksums(list(parameters.values()))]
        name = next_name("elastic.verify")
        everyone = Exchange(name, numbers, global_process_set, blocking=True).finish()
        refuse_differences(["", *parameters], everyone)


def refuse_differences(names: Sequence[str], numbers: Mapping[int, Sequence[int]]) -> None:
    """Raise MismatchError if ranks that had equal parameters have different ones now."""
    # By rank, `numbers` tells first whether the rank had received the state before, then a checksum
    # for each parameter. `names` says what the numbers belong to.
    members = {rank: mine for rank, mine in numbers.items() if mine[0]}
    if not members:
        return
    first, own = next(iter(members.items()))
    odd = [rank for rank, theirs in members.items() if theirs != own]
    if odd:
        place = next(i for i in range(len(names)) if members[odd[0]][i] != own[i])
        raise MismatchError(
            f"HVDLITE_ELASTIC_VERIFY=1: '{names[place]}' has other values on {ranks_text(odd)} "
            f"than on rank {first}, although these ranks have trained one model; look for an "
            "update that is not alike on all ranks, and start the job again from a checkpoint"
        )


def check_layout(mine: Mapping[str, str], roots: Mapping[str, str], rank: int) -> None:
    """Raise MismatchError if this rank's state does not hold the same tensors as rank 0's."""
    # Only ranks that differ from rank 0 raise, so that one rank that does not fit ends alone. By
    # name, `mine` and `roots` have the dtype and shape of each tensor here and on rank 0.
    for name in [*roots, *(name for name in mine if name not in roots)]:
        if mine.get(name) != roots.get(name):
            raise MismatchError(
                f"rank {rank} cannot receive the state of rank 0: '{name}' is "
                f"{mine.get(name, 'missing')} on rank {rank} and {roots.get(name, 'missing')} on "
                "rank 0; make the same model and optimizer on every rank"
            )
