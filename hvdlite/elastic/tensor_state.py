"""The base of states with tensors: all adapters synchronize them in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite import basics
from hvdlite.elastic.state import ObjectState
from hvdlite.errors import MismatchError
from hvdlite.objects import broadcast_object


class TensorState(ObjectState):
    """A state with tensors that all ranks must have alike. Adapters say which they are."""

    def __init__(self, **kwargs: Any) -> None:
        """Make the attributes that are plain objects."""
        super().__init__(broadcast_object, basics.rank, **kwargs)

    def sync(self) -> None:
        """Replace the state of every rank by that of rank 0, and save it.

        Raises:
            MismatchError: this rank's tensors are not like rank 0's.
        """
        layout = self._layout()
        check_layout(layout, broadcast_object(layout, root_rank=0), basics.rank())
        self._sync_tensors()
        super().sync()

    def _layout(self) -> dict[str, str]:
        """Describe the tensors that must be alike on all ranks, by name."""
        raise NotImplementedError

    def _sync_tensors(self) -> None:
        """Receive rank 0's tensors."""
        raise NotImplementedError


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
