"""The face of a process group that torch.distributed sees."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdlite.torch.distributed import ending
from hvdlite.torch.distributed.collectives import Collectives
from hvdlite.torch.distributed.engines import Membership, make_engine
from hvdlite.torch.distributed.exchanges import Exchanges
from hvdlite.torch.distributed.other_devices import (
    OtherDeviceError,
    backends_of,
    make_group,
    or_elsewhere,
)
from hvdlite.torch.distributed.point_to_point import PointToPoint

NAME = "hvdlite"


class HvdliteGroup(
    Collectives,
    Exchanges,
    PointToPoint,
    distributed.ProcessGroup,  # type: ignore[misc]
):
    """A process group whose members exchange CPU tensors over an engine of hvdlite.

    torch.distributed makes it, and calls its methods: users call the functions of
    torch.distributed.
    """

    def __init__(self, options: Any) -> None:
        member = Membership(
            options.store,
            options.group_rank,
            options.group_size,
            options.group_id,
            options.timeout,
        )
        distributed.ProcessGroup.__init__(self, member.rank, member.size)
        engine = make_engine(member)
        ending.enter(engine, member.rank)
        Collectives.__init__(self, engine, member.rank, member.size, member.name, member.timeout)
        self._member = member
        self._described = ""
        self._elsewhere: dict[str, Any] = {}

    def getBackendName(self) -> str:
        """Return the word that users give to init_process_group."""
        return NAME

    name = getBackendName
    _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """Return the name that torch.distributed has given to this group."""
        return self._title

    def setGroupName(self, name: str) -> None:
        """Take the name that torch.distributed gives to this group."""
        self._title = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        """The name that torch.distributed has given to this group."""
        return self._title

    def getGroupDesc(self) -> str:
        """Return the description that the user has given to this group."""
        return self._described

    def setGroupDesc(self, text: str) -> None:
        """Take the description that the user gives to this group."""
        self._described = text

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        """The description that the user has given to this group."""
        return self._described

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors this group carries."""
        return [torch.device(name) for name in self._backends()]

    def _backends(self) -> dict[str, str]:
        """Return by device the backends that the user has named."""
        try:
            config = distributed.distributed_c10d.get_backend_config(self)
        except (KeyError, ValueError):
            config = ""  # torch.distributed does not know the group yet, or no longer.
        return backends_of(config) or {"cpu": NAME}

    def elsewhere(self, error: OtherDeviceError) -> Any:
        """Return the group for the tensors of another device, or raise the error."""
        device = error.device.type
        backend = self._backends().get(device)
        if backend not in ("nccl", "gloo"):
            raise error
        if device not in self._elsewhere:
            made = make_group(self._member, device, backend, self._timeout)
            self._elsewhere[device] = made
        return self._elsewhere[device]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Leave the group; operations in flight get a moment to end."""
        while self._elsewhere:
            self._elsewhere.popitem()[1].shutdown()
        ending.end(self._engine)

    def abort(self) -> None:
        """Leave the group at once; the other members get an error."""
        self._engine.abort(f"rank {self._own_rank} aborted process group '{self._title}'")
        ending.end(self._engine)


_VERBS = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "broadcast",
        "allgather",
        "allgather_coalesced",
    ),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "gather", "scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall"),
    *("send", "recv"),
)
# Names of earlier releases of torch, and those of its C++ code.
_OTHER_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
for _verb in _VERBS:
    setattr(HvdliteGroup, _verb, or_elsewhere(getattr(HvdliteGroup, _verb)))
for _other, _verb in _OTHER_NAMES.items():
    setattr(HvdliteGroup, _other, getattr(HvdliteGroup, _verb))
